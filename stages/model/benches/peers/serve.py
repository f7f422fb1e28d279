"""What the peers share: run a named case once for every line on standard input, answer with the time it took.

The benchmark writes `case` lines; each answer is one JSON line: wall and CPU seconds of one run, and whatever the case
reports. The first mention of a case also prepares it and runs it once beforehand, so that set-up and first-use costs
are not counted.
"""

import json
import resource
import sys
import time

import torch


def serve(cases):
    """`cases`: name -> function that prepares the case and returns the function to time."""
    torch.set_num_threads(int(sys.argv[1]))
    ready = {}
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name == "memory":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak": peak}), flush=True)
            continue
        if name not in ready:
            ready.clear()
            ready[name] = cases(name)
            ready[name]()
        wall, cpu = time.perf_counter(), time.process_time()
        extra = ready[name]() or {}
        answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, **extra}
        print(json.dumps(answer), flush=True)
