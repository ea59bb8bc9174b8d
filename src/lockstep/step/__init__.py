"""One optimizer step from its pieces. Read the files in this order.

| name | file | what it is |
|---|---|---|
| `StepPasses` | passes.py | computes the gradient of a `Step` |
| `StepHook` | hook.py | is called at fixed places of each step |
| `Step` | step.py | one optimizer step on this process: a `StepBatch` and what its passes return |
| `GradientSum` | gradients.py | the sum of the gradients of the pieces |
| `StepBuffers` | buffers.py | gives each buffer one value after a step |
| `StepBatch` | batch.py | the micro-batches of one step that a process computes |
| `MicroBatch` | batch.py | a piece with its samples, on the device that computes it |
| `StepData` | batch.py | what a step needs of the data module |

A piece is an equal part of a step's samples, with a seed of its own.

The calls of a step, from the outside to the inside:

    StepLoop.advance                      fetch a StepBatch, call Lightning's hooks (lightning/steps.py)
      module.optimizer_step(closure)      Lightning's, or the user's
        StepPasses.run                    the closure
          StepPasses.compute              the passes in the order of strategy.schedule
            Step.forward, Step.backward   one micro-batch
              PieceStrategy.training_step the module's training_step, with the seed of the piece
            GradientSum.collect           after each backward pass
          StepPasses.reduce               GradientSum.reduce over all processes; the hooks before the optimizer step
      the optimizer steps
"""
