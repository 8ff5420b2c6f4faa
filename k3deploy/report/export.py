"""A run in the forms that other programs read: llama-bench's JSON, a Prometheus textfile, CSV, JUnit.

Pure functions of plan, facts and verdict. Samples that do not count are in the CSV, marked; nowhere else.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from k3deploy.facts import Block, Cell, Facts, Sample
from k3deploy.judge import Verdict

Plan = Mapping[str, Any]
# JUnit's word for a gate's or check's end.
_JUNIT = {"fail": "failure", "open": "skipped"}


def llama_bench(plan: Plan, facts: Facts, _verdict: Verdict) -> str:
    """A JSON list with llama-bench's fields, one entry a block and cell.

    ``n_gen`` is 0 for a prefill cell, ``n_prompt`` for a decode cell, as llama-bench has it. Beside its fields stand
    the arm, the state (llama-bench has only cold ones), the block and the run. The times are the server's own: prefill
    of a prompt includes the sampling of its first token, which llama-bench leaves out.
    """
    entries = []
    for block, cell in _cells(facts):
        times = [taken for sample in cell.valid() if (taken := _nanoseconds(cell, sample)) is not None]
        speeds = [speed for sample in cell.valid() if (speed := _speed(cell, sample)) is not None]
        if not times or len(times) != len(speeds):
            continue
        settings = _settings(plan, block.arm)
        entries.append(
            {
                "build_number": _build_number(block),
                "model_filename": (plan.get("model") or {}).get("path"),
                "n_batch": settings.get("batch_size"),
                "n_ubatch": settings.get("ubatch_size"),
                "n_threads": settings.get("threads"),
                "type_k": settings.get("cache_type_k"),
                "type_v": settings.get("cache_type_v"),
                "n_gpu_layers": settings.get("n_gpu_layers"),
                "split_mode": settings.get("split_mode"),
                "tensor_split": "/".join(str(share) for share in settings.get("tensor_split") or []),
                "n_prompt": 0 if cell.decodes else cell.n_prompt,
                "n_gen": cell.n_predict if cell.decodes else 0,
                "n_depth": cell.n_prompt if cell.decodes else 0,
                "test_time": block.started,
                "avg_ns": round(statistics.fmean(times)),
                "stddev_ns": round(statistics.stdev(times)) if len(times) > 1 else 0,
                "avg_ts": statistics.fmean(speeds),
                "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
                "samples_ns": [round(value) for value in times],
                "samples_ts": speeds,
                "k3_arm": block.arm,
                "k3_state": cell.state,
                "k3_block": block.index,
                "k3_run": facts.run_id,
            }
        )
    return json.dumps(entries, indent=1) + "\n"


def prometheus(plan: Plan, facts: Facts, verdict: Verdict) -> str:
    """What node_exporter's textfile collector takes: tokens per second by cell, memory minima, the verdict."""
    labels = {"cluster": plan.get("cluster"), "candidate": verdict.candidate, "run": facts.run_id}
    families: list[tuple[str, str, list[tuple[dict[str, Any], float]]]] = [
        ("k3deploy_verdict", "1 for the outcome of the run", [({"outcome": verdict.outcome}, 1)]),
        (
            "k3deploy_tokens_per_second",
            "Median over the valid samples of a block",
            [
                (
                    {"arm": block.arm, "block": block.index, "cell": cell.cell, "state": cell.state},
                    statistics.median(speeds),
                )
                for block, cell in _cells(facts)
                if (speeds := [speed for sample in cell.valid() if (speed := _speed(cell, sample)) is not None])
            ],
        ),
        (
            "k3deploy_memory_available_min_bytes",
            "Lowest MemAvailable of a rank during a block",
            [
                ({"arm": block.arm, "block": block.index, "rank": rank}, record.memory.min_available_mib * 2.0**20)
                for block in facts.blocks
                for rank, record in sorted(block.ranks.items())
                if record.memory and record.memory.min_available_mib is not None
            ],
        ),
    ]
    lines = []
    for name, words, values in families:
        lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge"]
        for own, value in values:
            text = ",".join(f'{key}="{_escaped(item)}"' for key, item in {**labels, **own}.items())
            lines.append(f"{name}{{{text}}} {value:.10g}")
    return "\n".join(lines) + "\n"


def table(_plan: Plan, facts: Facts, _verdict: Verdict) -> str:
    """CSV: one line a request, those that do not count included."""
    sink = io.StringIO()
    fields = [name for name in Sample.model_fields if name not in ("valid", "why")]
    head = ["run", "block", "pair", "arm", "cell", "state", *fields, "tokens_per_second", "valid", "why"]
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(head)
    for block, cell in _cells(facts):
        for sample in cell.samples:
            measured = [getattr(sample, name) for name in fields]
            speed = _speed(cell, sample)
            where = [facts.run_id, block.index, block.pair, block.arm, cell.cell, cell.state]
            writer.writerow([*where, *measured, speed, sample.valid, sample.why])
    return sink.getvalue()


def junit(_plan: Plan, facts: Facts, verdict: Verdict) -> str:
    """JUnit XML: a suite an arm, a case each check and gate. What is open is skipped, with its reason."""
    root = ElementTree.Element("testsuites", name=f"{verdict.candidate} {facts.run_id}: {verdict.outcome}")
    for arm in verdict.arms:
        cases = [
            *(
                (f"validity.{check.name}", "pass" if check.passed else "fail", "; ".join(check.problems))
                for check in arm.checks
            ),
            *((f"gate.{gate.name}", gate.outcome, gate.reason) for gate in arm.gates),
        ]
        ends = [end for _, end, _ in cases]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=arm.arm,
            tests=str(len(cases)),
            failures=str(ends.count("fail")),
            skipped=str(ends.count("open")),
        )
        for name, end, reason in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=arm.arm, name=name)
            if end in _JUNIT:
                ElementTree.SubElement(case, _JUNIT[end], message=_printable(reason))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


FORMATS: dict[str, tuple[str, Callable[[Plan, Facts, Verdict], str]]] = {
    "csv": ("samples.csv", table),
    "junit": ("junit.xml", junit),
    "llama-bench": ("llama-bench.json", llama_bench),
    "prometheus": ("k3deploy.prom", prometheus),
}
"""Format -> (its file in the run directory, how it is made)."""


def _cells(facts: Facts) -> Iterator[tuple[Block, Cell]]:
    for block in facts.blocks:
        for cell in block.bench.cells if block.bench else []:
            yield block, cell


def _speed(cell: Cell, sample: Sample) -> float | None:
    return sample.decode_per_second if cell.decodes else sample.prefill_per_second


def _nanoseconds(cell: Cell, sample: Sample) -> float | None:
    taken = sample.predicted_ms if cell.decodes else sample.prompt_ms
    return None if taken is None else taken * 1e6


def _settings(plan: Plan, arm: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((entry for entry in plan.get("arms") or [] if entry.get("name") == arm), {})
    return found.get("settings") or {}


def _build_number(block: Block) -> int | None:
    """11434 of ``b11434-0a1b2c3``."""
    text = str((block.bench.props.get("build_info") if block.bench else None) or "")
    number = text.removeprefix("b").partition("-")[0]
    return int(number) if number.isdigit() else None


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _printable(text: str) -> str:
    """XML has no character for most control codes."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
