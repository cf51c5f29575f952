"""Peak memory of a probe beyond what the process held before it: one probe in a fresh process, as JSON.

Run: ``python benchmarks/peak_memory.py convolution|convolution-default [--quick]``.
"""

from __future__ import annotations

import argparse
import json

import torch
from measuring import resident, seconds_of
from workloads import FULL, QUICK, convolution_rows, convolutional


def main() -> None:
    """Build, train one step, probe once, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    rows = convolution_rows(convolutional(QUICK if arguments.quick else FULL, torch.float32, device))
    by_key = {row.key: row for row in rows}
    if arguments.row not in by_key:
        parser.error(f"unknown row {arguments.row!r}: one of {', '.join(by_key)}")
    by_key["step"].run()
    after_step, before = resident("VmHWM"), resident("VmRSS")
    seconds, _ = seconds_of(by_key[arguments.row].run, device)
    peak = resident("VmHWM")
    # a peak of the step that was not exceeded says only that the probe took no more
    print(json.dumps({"seconds": seconds, "peak_bytes": peak - before, "exceeds_step": peak > after_step}))


if __name__ == "__main__":
    main()
