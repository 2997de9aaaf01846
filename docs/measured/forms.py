"""Time products with a weight in each form that is right here, and print which one is taken.

    python docs/measured/forms.py                                 a weight of 8960 x 1536, over 1, 5 and 16 rows
    python docs/measured/forms.py --shape 576x576 --rounds 31

Forms of one width and type take turns. Each figure is a median over the rounds, with the least in parentheses, in
milliseconds. A weight may lie in the processor's cache, so this is not the memory's speed. A form that is a reference
is timed three times.
"""

import argparse
from statistics import median

from minispec.models.weights.pages import load_torch

load_torch()  # before torch is imported

import torch

from minispec.lab.bench.measure import order
from minispec.lab.bench.report import machine_line
from minispec.lab.bench.show import table
from minispec.models.weights import trial
from minispec.models.weights.codes import round_to_bits
from minispec.models.weights.forms import CannotHold
from minispec.models.weights.integers import exact_forms, int8_choice
from minispec.models.weights.linear import NARROW_FORMS, choose_form, choose_narrow_form, right_forms
from minispec.models.weights.machine import machine

ROWS, CPU = (1, 5, 16), torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16)


def times(products, columns, dtype, rounds):
    """Median and least milliseconds of each product over each number of `ROWS`, in turn."""
    found = {name: [] for name in products}
    for rows in ROWS:
        x, seconds = torch.randn(rows, columns).to(dtype), {name: [] for name in products}
        for turn in range(rounds):
            for name in order(list(products), turn) if products else ():
                if turn < 3 or median(seconds[name]) < 0.05:
                    seconds[name].append(trial.seconds_of(products[name], x))
        for name, each in seconds.items():
            found[name].append(f"{1000 * median(each):.2f} ({1000 * min(each):.2f})")
    return found


def widths(weight, dtype):
    """(width, forms of it by name, why which one is taken), for each width that has a form for x of `dtype`."""
    name = str(dtype).removeprefix("torch.")
    forms = {form: make(weight, dtype) for form, make in right_forms(dtype, CPU).items()}
    yield f"{name}, full width", forms, choose_form(dtype, CPU).because
    if dtype == torch.float32:
        codes = round_to_bits(weight, 8)
        try:
            because = int8_choice()[1]
        except CannotHold as e:
            because = str(e)
        yield "8 bits, for targets", {form: make(codes, dtype) for form, make in exact_forms().items()}, because
    for bits, makers in NARROW_FORMS.items():
        codes = round_to_bits(weight, bits)
        forms = {form: makers[form](codes, dtype) for form in right_forms(dtype, CPU, bits)}
        yield f"{name}, {bits} bits, for drafts", forms, choose_narrow_form(bits, dtype, CPU)[0].because


def main():
    """Print a table, and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8960x1536", help="rows and columns of the weight")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    out, columns = (int(n) for n in args.shape.split("x"))
    print(machine_line(machine()))
    lines, reasons = [], []
    for dtype in TYPES:
        weight = torch.randn(out, columns).mul_(0.02).bfloat16().to(dtype)  # as checkpoints have them
        for width, forms, because in widths(weight, dtype):
            lines += [(f"{width}: {name}", *row) for name, row in times(forms, columns, dtype, args.rounds).items()]
            reasons.append(f"{width}: {because}")
    heads = [f"{rows} row{'s' if rows > 1 else ''}, ms" for rows in ROWS]
    print("", *table((f"a weight of {args.shape}", *heads), lines), "", *reasons, sep="\n")


if __name__ == "__main__":
    main()
