"""One optimizer step from its pieces: passes, hooks, gradients, buffers, micro-batches. Read them in this order.

| name | what it is |
|---|---|
| piece | an equal part of a step's samples, with a seed of its own |
| `MicroBatch` | a piece with its samples, on the device that computes it |
| `StepBatch` | the micro-batches of one step that a process computes |
| `Step` | one optimizer step on this process: a `StepBatch` and what its passes return |
| `StepPasses` | computes the gradient of a `Step` |
| `StepHook` | is called at fixed places of each step |
| `StepData` | what a step needs of the data module |

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
