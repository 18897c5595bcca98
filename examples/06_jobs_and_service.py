"""A tuning job in a store, a worker that does it, and the service that hands its result out.

Here all three run on one machine, one after the other. In earnest the store is PostgreSQL's, each
GPU machine runs `tuner jobs worker`, and one runs `tuner serve`.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request

SHAPE = "S=1024,D=64"


def tuner(*arguments: str, store: str) -> str:
    """Run a command, and return its standard output."""
    command = [sys.executable, "-m", "tuner", *arguments, "--store", store]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


with tempfile.TemporaryDirectory() as folder:
    store = f"{folder}/store.sqlite"
    job = tuner("jobs", "submit", "--shape", SHAPE, store=store).strip()
    print("job", job)
    # On a GPU machine without `--replay`, which takes recorded times.
    tuner("jobs", "worker", "--drain", "--replay", store=store)
    print(tuner("jobs", "show", job, store=store))

    command = [sys.executable, "-m", "tuner", "serve", "--port", "0", "--store", store]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE) as service:
        assert service.stderr is not None
        for line in service.stderr:
            print(line, end="", file=sys.stderr)
            if "http://" in line:
                break
        else:
            sys.exit("the service did not start")
        address = line[line.index("http://") :].split()[0].rstrip("/")
        with urllib.request.urlopen(f"{address}/v1/configs?shape={SHAPE}&gpu=H200") as response:
            for entry in json.load(response)["entries"]:
                time = f"{entry['latency_us']:.1f} us"
                print(entry["regime"], entry["provenance"], time, entry["config"]["family"])
        service.terminate()
