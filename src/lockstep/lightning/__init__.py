"""All that overrides Lightning 2.6: what its next version can break lies in this folder.

| file | what it overrides |
|---|---|
| `trainer.py` | the Trainer: it has our loops, and no signal handlers |
| `epochs.py` | the loop over epochs, which goes on after a resume |
| `steps.py` | the loop over an epoch's steps, and one optimizer step in it |
| `evaluations.py` | the loops over batches of an evaluation or prediction |
| `hooks.py` | how hooks are called |
| `precision.py` | the hooks around a backward pass, and clipping |
| `results.py`, `logged_values.py` | what is logged: one value for all pieces and ranks |
| `logs.py` | when it is reduced, shown and followed |
| `saves.py` | when a checkpoint is saved |
| `private_names.py` | what has no public name |

Every class or method names the behaviour of Lightning that it changes, and how to see it. Private names of Lightning
are used in this folder only. tests/step/test_loop.py and tests/test_promise_5_evaluation.py fail when they change.
"""
