"""Yours: the nets and the data that this project trains on. The engine, `lockstep`, imports nothing of it."""
