"""Many runs in one command: listed (grid) or drawn (search), each in a process of its own (jobs)."""
