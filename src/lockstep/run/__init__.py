"""What the programs of older projects import, whose `src/train.py` has no `train(job)`: nothing new belongs here."""
