"""`python -m tigon.bench`, the same as `tigon bench`."""

import argparse
import sys

from .main import add_arguments, run

parser = argparse.ArgumentParser(prog="tigon bench", description="Measure operators beside their peers.")
add_arguments(parser)
sys.exit(run(parser.parse_args()))
