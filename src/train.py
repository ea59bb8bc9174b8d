"""Train on any layout:  python src/train.py strategy=ddp devices=4 accumulate_grad_batches=2"""

if __name__ == "__main__":
    import lockstep.exit_on_signal  # noqa: F401  from here on Ctrl-C prints one line

from lockstep.run import cli
from lockstep.run.supervisor import train

if __name__ == "__main__":
    cli.command(train, "train")
