"""The pairs of programs: right ones, and ones of which the second has a mistake.

A side is `ranks, arguments`; a mistake's name is what the verdict must call it.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """A pair: the program, the arguments of both sides, and the kind of cause to name. `same`: the pair is right."""

    program: str
    first: str
    second: str
    kind: str

    def __str__(self) -> str:
        return f"{self.program}: {self.first or 'as it is'} | {self.second or 'as it is'}"


TORCH, LIGHTNING, ACCELERATE, TRANSFORMERS = "torch_loop", "lightning_fit", "accelerate_loop", "transformers_fit"
NAMES = {TORCH: "plain torch", LIGHTNING: "Lightning", ACCELERATE: "accelerate", TRANSFORMERS: "Hugging Face Trainer"}


def _rows(program: str, *lines: str) -> tuple[Row, ...]:
    cells = ([cell.strip() for cell in line.split("|")] for line in lines)
    return tuple(Row(program, first, second, kind) for kind, first, second in cells)


ROWS = (
    *_rows(
        TORCH,
        "same||",
        "same||--accumulate=2",
        "same||ranks=2",
        "same||ranks=2 --accumulate=2",
        "same|--net=conv --optimizer=adamw|ranks=2 --net=conv --optimizer=adamw",
        "same|--samples=54|--samples=54 --accumulate=2",
        "same|--clip=0.1|ranks=2 --clip=0.1",
        "same|--net=group --schedule|ranks=2 --net=group --schedule --accumulate=4",
        "same|--clip=0.01|ranks=2 --clip=0.01 --accumulate=2",
        "same|--normalize|ranks=2 --normalize --accumulate=2",
        "same|--net=sharp|--net=sharp --accumulate=2",
        "accumulation||--accumulate=2 --bug=accumulation",
        "accumulation|--clip=0.01|--clip=0.01 --accumulate=2 --bug=accumulation",
        "divided twice||--accumulate=2 --bug=twice",
        "sum instead of mean||--bug=sum",
        "sum instead of mean|--normalize|--normalize --bug=sum",
        "sum instead of mean|--optimizer=adamw|--optimizer=adamw --bug=sum",
        "sum instead of mean|--optimizer=sign|--optimizer=sign --bug=sum",
        "world size|--clip=0.01|ranks=2 --clip=0.01 --bug=world",
        "world size|--clip=0.01|ranks=2 --clip=0.01 --bug=times-world",
        "world size||ranks=2 --bug=world",
        "world size||ranks=2 --bug=times-world",
        "short last step|--samples=56|--samples=56 --accumulate=2 --bug=window",
        "short last step|--samples=60|--samples=60 --accumulate=2 --bug=alike",
        "BatchNorm|--net=norm|ranks=2 --net=norm",
        "buffers|ranks=2 --net=drift|ranks=2 --net=drift --bug=buffers",
        "ranks start apart|ranks=2|ranks=2 --bug=seed-by-rank",
        "noise|ranks=2 --net=dropout --bug=noise-by-rank|ranks=2 --net=dropout",
        "noise|--net=dropout|ranks=2 --net=dropout",
        "order of samples|ranks=2|ranks=2 --bug=set_epoch",
        "order of samples|ranks=2 --net=labelled|ranks=2 --net=labelled --bug=set_epoch",
        "order of samples||--bug=late-noise",
        "samples lost|--samples=60|--samples=60 --bug=drop_last",
        "samples repeated|--samples=61|ranks=2 --samples=61",
        "same samples on each rank|ranks=2|ranks=2 --bug=same-samples",
        "schedule|--schedule|--schedule --accumulate=2 --bug=schedule-per-micro-batch",
        "schedule|--schedule|ranks=2 --schedule --bug=schedule-per-process",
        "learning rate||ranks=2 --bug=scaled-rate",
        "clipping|--clip=0.1|--clip=0.1 --accumulate=2 --bug=clip-passes",
        "clipping|--clip=0.1|ranks=2 --clip=0.1 --bug=clip-ranks",
        "weight decay||--bug=decay",
        "frozen||--bug=frozen",
        "evaluation mode|--net=dropout|--net=dropout --bug=eval",
        "precision||--bug=autocast",
        "initial state||--bug=seed",
        "initial state||--bug=head",
        "nondeterminism||--bug=unseeded",
        "inputs|--net=last|--net=last --bug=wide",
        "gradients not averaged|--samples=56|ranks=2 --bug=not-averaged",
    ),
    *_rows(
        LIGHTNING,
        "accumulation|--clip=0.01|--clip=0.01 --accumulate=2 --bug=accumulation",
        "same||--accumulate=2",
        "same||ranks=2",
        "same|--clip=0.1|ranks=2 --clip=0.1 --accumulate=2",
        "accumulation||--accumulate=2 --bug=accumulation",
        "divided twice||--accumulate=2 --bug=twice",
        "sum instead of mean||--bug=sum",
        "world size||ranks=2 --bug=times-world",
        "short last step|--samples=56|--samples=56 --accumulate=2",
        "BatchNorm|--net=norm|ranks=2 --net=norm",
        "buffers|--net=drift|ranks=2 --net=drift",
        "noise|ranks=2 --net=dropout --bug=noise-by-rank|ranks=2 --net=dropout",
        "order of samples|ranks=2|ranks=2 --bug=set_epoch",
        "samples lost|--samples=60|--samples=60 --bug=drop_last",
        "same samples on each rank|ranks=2|ranks=2 --bug=same-samples",
        "schedule|--schedule|--schedule --accumulate=2 --bug=schedule-per-micro-batch",
        "learning rate||ranks=2 --bug=scaled-rate",
        "clipping|--clip=0.1|--clip=0.1 --accumulate=2 --bug=clip-passes",
        "weight decay||--bug=decay",
        "frozen||--bug=frozen",
        "evaluation mode|--net=dropout|--net=dropout --bug=eval",
        "precision||--bug=autocast",
        "initial state||--bug=head",
    ),
    *_rows(
        ACCELERATE,
        "same||--accumulate=2",
        "same||ranks=2",
        "same|--schedule|ranks=2 --schedule",
        "batch size||ranks=2 --bug=batch-per-process",
        "divided twice||--accumulate=2 --bug=twice",
        "sum instead of mean||--bug=sum",
        "world size||ranks=2 --bug=times-world",
        "short last step|--samples=56|--samples=56 --accumulate=2",
        "BatchNorm|--net=norm|ranks=2 --net=norm",
        "clipping|--clip=0.1|--clip=0.1 --accumulate=2 --bug=clip-passes",
        "weight decay||--bug=decay",
        "frozen||--bug=frozen",
        "precision||--bug=autocast",
    ),
    *_rows(
        TRANSFORMERS,
        "same||--accumulate=2",
        "same||ranks=2",
        "same|--net=conv|ranks=2 --net=conv",
        "accumulation|--bug=own-loss|--accumulate=2 --bug=accumulation",
        "sum instead of mean|--bug=own-loss|--bug=sum",
        "world size|--bug=own-loss|ranks=2 --bug=times-world",
        "short last step|--net=conv|ranks=2 --net=conv --bug=tokens-by-rank",
        "short last step|--net=conv|--net=conv --accumulate=2 --bug=tokens-by-pass",
        "noise|--net=dropout|ranks=2 --net=dropout",
        "schedule||--bug=no-schedule",
        "weight decay||--bug=decay",
        "frozen||--bug=frozen",
        "precision||--bug=autocast",
        "batch size||--bug=batch",
    ),
)
