"""Your code: the nets and the data sets of this project. The engine, `lockstep`, imports nothing from it."""
