"""`python -m tutorials [NAME ...]`: run tutorials, write docs/tutorials."""

import argparse
import time

from tutorials.render import FOLDER, SCRIPTS, run, write

parser = argparse.ArgumentParser(
    prog="python -m tutorials",
    description="Run tutorials and write them into docs/tutorials.",
)
parser.add_argument(
    "names",
    nargs="*",
    choices=[[], *SCRIPTS],
    metavar="NAME",
    help=f"{', '.join(SCRIPTS)}; default: all",
)
for name in parser.parse_args().names or SCRIPTS:
    start = time.perf_counter()
    write(name, run(name), FOLDER)
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
