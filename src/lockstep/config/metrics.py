"""Find out whether the largest or the smallest value of a metric is the best: `max` or `min`.

This is the only place that decides it, for checkpoints, early stopping, schedules, sweeps, searches and tables.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.errors import UserError

MODES = ("max", "min")


class UnknownMode(UserError):
    """Whether larger or smaller values of a metric are better does not follow from its name."""


Known = Callable[[str], str | None]  # the best value of a metric: `max`, `min`, or None if that is not known


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words of a metric's name that say which value is the best.
SMALLEST = _set("""
    loss losses err errs error errors mistakes misclassification perplexity ppl bpd bpp nll ce bce xent crossentropy
    mse rmse mae msle rmsle mape smape huber brier ece kl kld divergence distance distances distortion l1 l2 hausdorff
    hd chamfer emd wasserstein mmd fid kid lpips wer cer eer epe hinge deviance regret cost
""")
LARGEST = _set("""
    acc accuracy accuracies balancedaccuracy auc auroc rocauc roc auprc prauc aupr f1 f1score f2 fbeta fscore
    precision prec recall sensitivity specificity iou miou giou diou ciou jaccard dice ap map kappa qwk mcc matthews
    r2 r2score psnr ssim bleu rouge ndcg mrr correct
""")
# Words that may turn a metric round, or make another quantity of it: the direction is then not known.
OTHER = _set("""
    neg negative negated minus inverse inv reciprocal non not no anti un false miss missed std var variance gap diff
    difference delta drop change improvement decrease increase gain reduction ratio weight scale corr correlation time
    seconds count num number lr grad norm
""")
LOSSES = _set("loss losses err error errors distance divergence")  # at a name's end: `dice_loss`
TURNED = ("neg", "minus", "inaccuracy")  # begins of a longer word: `negloss`
OPPOSITE = re.compile(r"(^|[/. ])1 ?-")  # `1-acc`
STAGES = _set("train training val valid validation test eval step epoch dataloader idx")


def words(metric: str) -> list[str]:
    """Return the words of a metric's name: `val/top5_err` has val, top5, err, and `valLoss` has val, loss."""
    parts: list[str] = []
    for token in re.split(r"[^A-Za-z0-9]+", metric):
        whole = token.lower()
        if whole in SMALLEST | LARGEST:
            parts.append(whole)
        else:
            in_case = re.findall(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*|\d+", token.replace("IoU", "Iou"))
            parts += [part.lower() for part in in_case]
    return parts


def direction_of_name(metric: str) -> str | None:
    """Return `max` or `min` by the words of a metric's name, or None if they say neither or both."""
    named_words = [word for word in words(metric) if word not in STAGES]
    if {"log", "likelihood"} <= set(named_words):
        return "min" if {"neg", "negative"} & set(named_words) else "max"
    if OTHER & set(named_words) or OPPOSITE.search(metric):
        return None
    modes = [mode for word in named_words if (mode := _direction_of_word(word))]
    if len(set(modes)) == 2:  # a score turned into a loss is one, as in `dice_loss`
        return "min" if named_words[-1].rstrip("0123456789") in LOSSES else None
    return modes[0] if modes else None


def _direction_of_word(word: str) -> str | None:
    for form in (word, word.rstrip("0123456789")):  # `ap50` and `acc5`, but `f1` and `l2` have their digits
        if form in SMALLEST or (form.endswith(("loss", "error")) and not form.startswith(TURNED)):
            return "min"
        if form in LARGEST or (form.endswith(("accuracy", "f1score")) and not form.startswith(TURNED)):
            return "max"
    return None


def directions_of_module(module: Any) -> Known:
    """Return a function that finds a metric's direction by the torchmetrics objects among a module's attributes.

    They say `higher_is_better`. An object belongs to a metric of its attribute's name, as `val_acc` to `val/acc`, or of
    its name in a MetricCollection.
    """
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.wrappers import ClasswiseWrapper

    named: list[tuple[str, bool, str]] = []  # name, whether a class's label may follow it, direction
    for path, part in module.named_modules():
        if isinstance(part, MetricCollection):
            items: Iterable[tuple[str, Any]] = part.items(copy_state=False)  # with prefix and postfix
        elif isinstance(part, Metric):
            items = [(path.rpartition(".")[2], part)]
        else:
            continue
        for name, metric in items:
            if mode := direction_of_object(metric):
                by_class = isinstance(metric, ClasswiseWrapper)
                names = [name, *([type(metric.metric).__name__] if by_class else [])]
                named += [(_without_stages(each), by_class, mode) for each in names if _without_stages(each)]

    def known(metric: str) -> str | None:
        wanted = _without_stages(metric)
        modes = {mode for name, labels, mode in named if name == wanted or (labels and wanted.startswith(name))}
        return modes.pop() if len(modes) == 1 else None

    return known


def _without_stages(name: str) -> str:
    return "".join(word for word in words(name) if word not in STAGES)


def direction_of_object(metric: Any) -> str | None:
    """Return the direction that a torchmetrics object, or the one that it wraps, states; None if it states none."""
    from torchmetrics import MaxMetric, Metric, MinMetric

    if isinstance(metric, MaxMetric | MinMetric):  # the best value so far
        return "max" if isinstance(metric, MaxMetric) else "min"
    if isinstance(better := getattr(metric, "higher_is_better", None), bool):
        return "max" if better else "min"
    inner = [part for part in metric.children() if isinstance(part, Metric)] if isinstance(metric, Metric) else []
    return direction_of_object(inner[0]) if inner else None


def best_value(mode: str) -> str:
    """Return what a mode says, for messages."""
    return "larger is better" if mode == "max" else "smaller is better"


def resolve_mode(key: str, metric: str, mode: Any, mode_key: str, known: Known = direction_of_name) -> str:
    """Return the mode of a metric.

    Args:
        key: the key that names the metric, for messages.
        mode: what the user gave; None: it follows from the metric.
        mode_key: the key of the mode.
        known: finds the direction of a metric.

    Raises:
        UserError: The mode contradicts the metric; or it is not given, and does not follow from the metric.
    """
    if mode not in (None, *MODES):
        raise UserError(f"{mode_key}={mode}: must be max or min, or null, with which it follows from {key}={metric}")
    right = known(metric)
    if mode is None and right is None:
        raise UnknownMode(
            f"{key}={metric}: whether larger or smaller is better does not follow from this name: "
            f"give {mode_key}=max or {mode_key}=min"
        )
    if None not in (mode, right) and mode != right:
        raise contradiction(f"{mode_key}={mode}", metric, str(right), f"give {mode_key}={right}")
    return str(mode or right)


def contradiction(setting: str, metric: str, right: str, remedy: str) -> UserError:
    """Return the error about a mode that contradicts its metric. `remedy` says what would be right."""
    return UserError(f"{setting}: {'larger' if right == 'max' else 'smaller'} values of {metric} are better: {remedy}")


def known_of_model(model: Mapping[str, Any], otherwise: Known = direction_of_name) -> Known:
    """Return a function that finds a metric's direction: of the model's own `monitor` by its `mode`.

    Args:
        model: the `model` group.
        otherwise: finds the direction of other metrics.

    Raises:
        UserError: The model's `mode` contradicts its `monitor`.
    """
    monitor, mode = model.get("monitor"), model.get("mode")
    if not isinstance(monitor, str) or mode not in MODES:  # they may be arguments of the module, with other meanings
        return otherwise
    resolve_mode("model.monitor", monitor, mode, "model.mode", otherwise)
    return lambda metric: mode if metric == monitor else otherwise(metric)


def with_mode(key: str, options: Mapping[str, Any], known: Known, required: bool) -> dict[str, Any]:
    """Return the options of a group that has a `monitor`, with the `mode` that follows from it.

    Args:
        key: the group, such as `callbacks.checkpoint`.
        known: finds the direction of a metric.
        required: whether to refuse a metric of unknown direction without a `mode`.

    Raises:
        UserError: see `resolve_mode`.
    """
    monitor, mode = options.get("monitor"), options.get("mode")
    if not isinstance(monitor, str) or mode not in (None, *MODES):  # another `mode`: the group's class checks it
        return dict(options)
    if mode is None and not required and known(monitor) is None:
        return dict(options)
    mode_key = f"{'' if 'mode' in options else '+'}{key}.mode"
    return {**options, "mode": resolve_mode(f"{key}.monitor", monitor, mode, mode_key, known)}
