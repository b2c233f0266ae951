"""CPU workers on many cores: the plain loop on all, DDP over Gloo, and phalanx with 1, 2, 4 workers and so on.

    python benchmarks/gpu/cores.py                   # nine minutes for a round; the same call goes on
    python benchmarks/gpu/cores.py gpt BERT --rounds 3
    CAMPAIGN_DEVICE=cpu python benchmarks/gpu/cores.py

Fresh processes, as benchmarks/step.py times them. All columns of phalanx have as many replicas as there are workers in
the last one, so that their digests must be the same.
"""

import collections
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here is about a GPU

import common
import torch
from common import Case, Outcome
from torch import nn
from torch.nn import functional as F

from benchmarks import step
from benchmarks.step import models, peers

PLAIN = "plain, all cores"
MOST = 16
VISION, WORDS = "resnet18, torchvision", "BERT, transformers"
ALL = ("tiny", "gpt", "lenet", "mlp", "BERT", "resnet18", VISION, WORDS)
NEEDS = {VISION: "torchvision", WORDS: "transformers"}
STEPS = 12  # of models from elsewhere


class Words(nn.Module):
    """A small BERT of transformers, by its configuration."""

    def __init__(self) -> None:
        import transformers  # pyright: ignore[reportMissingImports]  which not every machine has

        super().__init__()
        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        configuration = transformers.BertConfig(vocab_size=1000, max_position_embeddings=64, **sizes)
        self.body = transformers.BertForSequenceClassification(configuration)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).logits


def resnet18() -> nn.Module:
    import torchvision  # pyright: ignore[reportMissingImports]  which not every machine has

    return torchvision.models.resnet18(num_classes=10)


def case_of(name: str) -> models.Case:
    """A model with what it is trained on."""
    if name not in NEEDS:
        found = models.case(name)
        return found.shortened() if common.SMALL else found
    count, random = models.fresh(32, STEPS), torch.Generator().manual_seed(0)
    y = torch.randint(2, (count,), generator=random)
    if name == VISION:
        return models.Case(resnet18, torch.randn(count, 3, 64, 64, generator=random), y, F.cross_entropy, 32, STEPS)
    return models.Case(Words, torch.randint(1, 1000, (count, 64), generator=random), y, F.cross_entropy, 32, STEPS)


def workers() -> list[int]:
    """1, 2, 4 and so on, as far as there are cores."""
    most = min(2 if common.SMALL else MOST, common.cores())
    return [count for count in (1, 2, 4, 8, 16) if count <= most]


def columns() -> list[str]:
    most = workers()[-1]
    return [PLAIN, f"DDP W={most}", *(f"R={most} W={count}" for count in workers())]


def here(name: str, column: str) -> dict[str, Any]:
    """Facts of a column, in this process."""
    if column == PLAIN:
        return peers.plain(case_of(name), common.cores())
    return step.measure(column, case_of(name))


def measured(name: str, column: str) -> Outcome:
    """The same in a fresh process."""
    found = common.apart(__file__, name, column, seconds=140, tries=3 if column.startswith("DDP") else 1)
    digest = {"digest": found["digest"][:12]} if "digest" in found else {}
    return Outcome("measured", "", {"ms": found["seconds"] * 1e3, **digest})


def cases(rounds: int, names: Sequence[str]) -> Iterator[Case]:
    """Rounds of all models and columns, every second one backwards."""
    for number in range(rounds):
        for name in names:
            needs = NEEDS.get(name)
            if needs and importlib.util.find_spec(needs) is None:
                yield Case(name, "round 0", functools.partial(Outcome, "not tried", f"there is no {needs}"))
                continue
            for column in columns() if number % 2 == 0 else reversed(columns()):
                yield Case(name, f"{column}, round {number}", functools.partial(measured, name, column))


def same_digests(rows: common.Rows, name: str) -> Callable[[], Outcome]:
    """Whether all columns of phalanx ended alike."""

    def do() -> Outcome:
        digests = {row["values"]["digest"] for row in rows.rows if row["part"] == name and "digest" in row["values"]}
        if not digests:
            return Outcome("not tried", "no run was measured")
        return Outcome("same" if len(digests) == 1 else "different", f"{sorted(digests)}, W = {workers()}")

    return do


def report(rows: common.Rows) -> str:
    """Milliseconds of each column, and how much faster the last one is than the others."""
    times = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows.rows:
        if "ms" in row["values"]:
            times[row["part"]][row["case"].rpartition(", round ")[0]].append(row["values"]["ms"])
    last = columns()[-1]
    lines = []
    for name, found in times.items():
        middle = {column: statistics.median(each) for column, each in found.items()}
        ratios = [
            f"{middle[column] / middle[last]:.2f}" if column in middle and last in middle else ""
            for column in columns()[:-1]
        ]
        lines.append([name, *(common.shown(middle.get(column, "")) for column in columns()), *ratios])
    header = ["model", *(f"{column}, ms" for column in columns()), *(f"{each} / {last}" for each in columns()[:-1])]
    notes = [f"{row['part']}: {row['verdict']}, {row['note']}" for row in rows.rows if row["note"]]
    return "\n\n".join([common.heading(rows, "Cores"), common.table(header, lines), *notes])


def main() -> int:
    parser = common.arguments(__doc__ or "", ALL)
    parser.add_argument("--rounds", type=int, default=1 if common.SMALL else 2)
    given = parser.parse_args()
    if given.apart:
        print(json.dumps(here(*given.apart)), flush=True)
        return 0
    rows = common.Rows("cores", again=given.again, wrong=given.wrong, device="cpu")
    names: Sequence[str] = given.parts or (("tiny", "gpt", VISION, WORDS) if common.SMALL else ALL)
    checks = (
        Case(name, f"digests, {given.rounds} rounds", same_digests(rows, name)) for name in names if name not in NEEDS
    )
    left = common.run(rows, itertools.chain(cases(given.rounds, names), checks), given.minutes)
    text = report(rows)
    common.save("cores", "cores", text, given.save)
    return common.finish(rows, left, text)


if __name__ == "__main__":
    sys.exit(main())
