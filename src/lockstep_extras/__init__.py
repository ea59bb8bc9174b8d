"""Features beside the core. Each is a folder that nothing outside names: docs/extras.md."""
