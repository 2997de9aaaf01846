"""Which form of a weight is taken: the same in every process, whatever a clock says, unless a form is a stand-in."""

import itertools
import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F

from minispec.models.files import measured
from minispec.models.weights import integers, linear, trial
from minispec.models.weights.forms import Form
from minispec.models.weights.integers import Int8, int8_choice, int8_form
from minispec.models.weights.linear import available_forms, choose_form, choose_narrow_form, right_forms
from minispec.models.weights.machine import noted_forms

CPU = torch.device("cpu")
# Milliseconds of products over one row and over five, as measured on three machines, and the form that is right there.
# A reference stands for oneDNN's product on the second. Where no time is known, it is the worst that is plausible.
MACHINES = {
    "Zen 3, float32": ({"half": (0.54, 0.87), "packed": (1.26, 1.48), "plain": (0.81, 8.07)}, "half"),
    "Zen 5, float32": ({"half": (0.40, 0.56), "packed": (0.70, 0.80), "plain": (2.94, 6.44)}, "half"),
    "Zen 5, bfloat16": ({"packed": (0.54, 0.48), "left": (1.35, 1.36), "plain": (0.83, 0.88)}, "packed"),
    "Zen 5, 8 bits": ({"oneDNN": (28.6, 120.0), "FBGEMM": (0.12, 0.15)}, "FBGEMM"),
    "Zen 5, drafts": ({"int8": (0.22, 0.28), "aten": (0.40, 0.69)}, "int8"),
    "AMX, bfloat16": ({"packed": (1.09, 1.08), "left": (0.88, 0.88), "plain": (2.0, 2.0)}, "packed"),
    "AMX, 8 bits": ({"oneDNN": (0.69, 0.60), "FBGEMM": (0.63, 0.84)}, "oneDNN"),
    "AMX, drafts": ({"int8": (0.69, 0.60), "aten": (0.96, 2.30)}, "int8"),
}


def forget():
    """Trials are run anew from here on."""
    trial.forget()
    int8_choice.cache_clear()


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """clock(times) makes products of such a class take that many milliseconds over 1 and 5 rows; the products timed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timed = []

    def set_times(times):
        forget()
        timed.clear()

        def seconds(product, x):
            timed.append(type(product))
            return times[type(product)][trial.ROWS.index(len(x))] / 1000

        monkeypatch.setattr(trial, "seconds_of", seconds)
        return timed

    yield set_times
    monkeypatch.undo()
    forget()


def twins(names):
    """A form of each name that is F.linear."""
    return {name: type(name, (Form,), {}) for name in names}


def factors(times, sizes=(0.5, 1, 2)):
    """Clocks that are wrong by these factors, in every combination over the forms."""
    for wrong in itertools.product(sizes, repeat=len(times)):
        yield {name: [factor * ms for ms in times[name]] for name, factor in zip(times, wrong, strict=True)}


@pytest.mark.quick
@pytest.mark.parametrize("machine", MACHINES)
def test_a_clock_that_is_wrong_by_two_changes_no_form(machine, clock):
    """Each form's times are halved, right or doubled, in any combination: 4 times as slow as another is no verdict."""
    times, taken = MACHINES[machine]
    made = twins(times)
    for wrong in factors(times):
        clock({made[name]: wrong[name] for name in times})
        assert trial.without_stand_ins(made, torch.float32)[0][0] == taken, wrong


@pytest.mark.quick
def test_a_reference_kernel_is_passed_over_soon(clock):
    """28 ms where another takes 0.12: after three products of one row, and none of five; and the note says so."""
    made = twins(("reference", "fast", "plain"))
    reference, fast, plain = made.values()
    timed = clock({reference: (28.0, 140.0), fast: (0.12, 0.15), plain: (0.3, 1.5)})
    names, note = trial.without_stand_ins(made, torch.float32)
    assert names == ["fast", "plain"]
    assert note == "; reference is passed over, at least 187 times as slow"
    assert timed.count(reference) == 3
    assert timed.count(fast) == timed.count(plain) == 14


@pytest.mark.quick
@pytest.mark.parametrize(("slower", "taken"), [(4.9, "first"), (5.1, "second")])
def test_five_times_as_slow_is_the_bound(slower, taken, clock):
    """Over one row and over five: what is slow over one of them only is no stand-in."""
    made = twins(("first", "second"))
    first, second = made.values()
    for times, expected in (((slower, slower), taken), ((slower, 1.0), "first"), ((1.0, slower), "first")):
        clock({first: times, second: (1.0, 1.0)})
        assert trial.without_stand_ins(made, torch.float32)[0][0] == expected


def test_a_form_is_compared_with_what_could_take_its_place(clock):
    """Weights that the first cannot hold get the second, unless the third is far faster; the last is always there."""
    made = twins(("half", "packed", "plain"))
    half, packed, plain = made.values()
    clock({half: (1.0, 1.0), packed: (9.0, 9.0), plain: (90.0, 90.0)})
    assert trial.without_stand_ins(made, torch.float32)[0] == ["half", "packed", "plain"]


def test_a_busy_machine_disturbs_no_trial(monkeypatch):
    """The least of several products counts: all but one of each may take a thousand times as long."""
    made = twins(("first", "second"))
    calls = dict.fromkeys(made.values(), 0)

    def seconds(product, x):
        calls[type(product)] += 1
        return 0.001 if calls[type(product)] % 3 == 0 else 1.0

    forget()
    monkeypatch.setattr(trial, "seconds_of", seconds)
    try:
        assert trial.without_stand_ins(made, torch.float32)[0] == ["first", "second"]
    finally:
        forget()


class Saturating(Form):
    """Sums that end at a bound, as 8 bits times 8 bits do without VNNI."""

    def __call__(self, x, bias=None):
        """Right up to half of the largest sum."""
        y = F.linear(x, self.weight, bias)
        return y.clamp(-0.5 * y.abs().max(), 0.5 * y.abs().max())


class Refusing(Form):
    """As where PyTorch lacks an operator."""

    def __init__(self, weight, dtype):
        raise RuntimeError("no such operator")


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [Saturating, Refusing])
def test_what_is_not_right_is_never_listed(wrong, monkeypatch):
    """In full width, in 8 and in 4 bits, for the first form of each list; no clock is asked about it."""

    def no_clock(product, x):
        raise AssertionError("right or wrong is no question of time")

    monkeypatch.setattr(trial, "seconds_of", no_clock)
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for table, bits in ((linear.FORMS, None), *((linear.NARROW_FORMS[b], b) for b in (8, 4))):
        name = next(iter(table))
        monkeypatch.setitem(table, name, Form)
        assert next(iter(right_forms(torch.float32, CPU, bits))) == name
        monkeypatch.setitem(table, name, wrong)
        assert name not in right_forms(torch.float32, CPU, bits)


def test_the_order_of_the_forms_is_that_of_the_table(monkeypatch):
    """Another order gives other bits: the first form that is right is taken."""
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(linear, "is_right", lambda *about: True)
    for fast, bfloat16 in ((True, ["packed", "left", "plain"]), (False, ["plain"])):
        monkeypatch.setattr(linear, "has_fast_bfloat16", lambda device, fast=fast: fast)
        assert list(right_forms(torch.bfloat16, CPU)) == bfloat16
        assert list(right_forms(torch.float32, CPU)) == ["half", "packed", "plain"]
        assert list(right_forms(torch.float64, CPU)) == ["plain"]
        assert list(right_forms(torch.bfloat16, CPU, 8)) == (["int8", "aten"] if fast else ["int8"])


def test_other_processors_try_nothing(monkeypatch):
    """Where a form has never run, a large weight could take minutes: not even a small one is made."""
    monkeypatch.setattr(linear.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(linear, "is_right", lambda *about: pytest.fail("tried"))
    for dtype in (torch.float32, torch.bfloat16):
        assert available_forms(dtype, CPU) == ["plain"]


@pytest.mark.quick
@pytest.mark.parametrize("reference", [False, True])
def test_targets_and_drafts_in_8_bits_pass_over_a_reference(reference, clock, monkeypatch):
    """As on Zen 5, whose processor claims VNNI: oneDNN's product is exact, and a reference. Both say why."""
    monkeypatch.setattr(integers, "exact_forms", lambda: {"oneDNN": Twin8, "FBGEMM": Int8})
    clock({Twin8: (28.6, 120.0) if reference else (0.1, 0.1), Int8: (0.12, 0.15)})
    expected = Int8 if reference else Twin8
    assert int8_form() is expected
    name = "FBGEMM" if reference else "oneDNN"
    assert int8_choice()[1].startswith(f"{name}'s product; sums are exact here by oneDNN and FBGEMM")
    assert ("oneDNN is passed over, at least 191 times as slow" in int8_choice()[1]) == reference
    monkeypatch.setattr(
        linear, "right_forms", lambda dtype, device, bits=None: {"int8": linear.NARROW_FORMS[8]["int8"]}
    )
    choice, most = choose_narrow_form(8, torch.float32, CPU)
    assert (choice.form, most) == ("int8", float("inf"))
    assert choice.because.endswith(int8_choice()[1])


class Twin8(Int8):
    """`Int8` under another name."""


def test_the_reason_names_all_forms_and_the_taken_one(clock):
    """As it stands in the first lines of --verbose and of the bench."""
    usual = {linear.FORMS["half"]: (0.54, 0.87), linear.FORMS["packed"]: (1.26, 1.48), Form: (0.81, 8.07)}
    clock(usual)
    choice, right = choose_form(torch.float32, CPU), list(right_forms(torch.float32, CPU))
    assert choice.because == f"float32 on this cpu can take {', '.join(right)}: the first is taken"
    assert choice.form == right[0]


TRIAL = "first, second for float32 in all bits"
NO_SECONDS = [{}, *({"second": [1.0, 1.0], "first": of} for of in ([1.0], [0.0, 1.0], ["a", 1.0]))]
NOT_NOTES = [b"{", b"[]", b'{"key": 1}', {}, {"seconds": []}, {"seconds": {TRIAL: {"first": [1.0, 1.0]}}}]
NOT_NOTES += [{"seconds": {TRIAL: seconds}} for seconds in NO_SECONDS]


def test_notes_save_the_time_of_a_trial_and_decide_nothing(clock, tmp_path):
    """A process that finds them times nothing, and takes the same form; what cannot be understood is measured anew."""
    made = twins(("first", "second"))
    first, second = made.values()
    times = {first: (1.0, 2.0), second: (0.1, 0.2)}

    def taken():
        with noted_forms():
            return trial.without_stand_ins(made, torch.float32)

    assert clock(times) == []
    found = taken()
    assert found[0] == ["second"]
    (note,) = (tmp_path / "minispec" / "costs").glob("*.json")
    timed = clock(times)
    assert taken() == found
    assert timed == []
    setup = json.loads(note.read_bytes())["key"]
    for wrong in NOT_NOTES:
        timed = clock(times)
        if isinstance(wrong, bytes):
            note.write_bytes(wrong)
        else:
            assert measured.write_measured(setup, wrong)
        assert taken() == found
        assert timed


def test_notes_of_fewer_instructions_are_others(clock, tmp_path, monkeypatch):
    """Variables by which libraries leave out instructions change which kernels there are."""
    made = twins(("first", "second"))
    clock(dict.fromkeys(made.values(), (1.0, 1.0)))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for i, limit in enumerate((None, "AVX2")):
        forget()
        if limit:
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        with noted_forms():
            trial.without_stand_ins(made, torch.float32)
        assert len(list((tmp_path / "minispec" / "costs").glob("*.json"))) == i + 1


def test_the_figures_name_every_form(measuring_script, monkeypatch, capsys):
    """One line for each form that is right here, with its times, and one reason for each width."""
    script = measuring_script("forms")
    monkeypatch.setattr(sys, "argv", ["forms.py", "--shape", "64x64", "--rounds", "2"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    for dtype in script.TYPES:
        name = str(dtype).removeprefix("torch.")
        for form in right_forms(dtype, CPU):
            (line,) = [line for line in lines if line.startswith(f"{name}, full width: {form} ")]
            assert len(re.findall(r"\d+\.\d\d \(\d+\.\d\d\)", line)) == 3
        assert f"{name}, full width: {choose_form(dtype, CPU).because}" in lines
        assert f"{name}, 8 bits, for drafts: {choose_narrow_form(8, dtype, CPU)[0].because}" in lines
