"""What image classifiers are made of: data sets, nets, schedules, parameter groups, pictures."""
