"""Your code: the nets and the data sets of this project. `lockstep` imports nothing from it."""
