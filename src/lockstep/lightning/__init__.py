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
| `strategy.py` | the strategies: what all of ours do otherwise |
| `one_process.py`, `process_per_device.py` | the two kinds of strategy; fsdp derives from the second |
| `private_names.py` | what a Trainer reads of a user's objects |
| `torch_ddp.py` | torch's DDP, which Lightning makes |

"See it:" in a docstring says how to see the behaviour of Lightning that is changed. Private names of Lightning are used
in this folder only. tests/step/test_loop.py and tests/test_promise_5_evaluation.py fail when they change.
"""
