"""What `lockstep compare` reads of runs, computes and draws."""
