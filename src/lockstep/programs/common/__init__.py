"""What several commands share: keys of yaml files, tables and plots, steps taken again."""
