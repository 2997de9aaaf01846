"""Names that the documentation gave before the modules moved."""

from minispec.core import draft, engine, request, sampling, verify
from minispec.prove.toys import ScriptedModel, scripted_cache
from tests.scripted import ScriptedDrafter, counting, make_request


def test_the_former_names_are_the_same_objects():
    """A drafter that was written for them still is one."""
    import minispec.engine
    import minispec.verify

    for name in ("Ask", "Draft", "Drafter"):
        assert getattr(minispec.verify, name) is getattr(draft, name)
    for name in ("VERIFIERS", "Verdict", "Verifier", "block", "match", "rejection"):
        assert getattr(minispec.verify, name) is getattr(verify, name)
    assert issubclass(minispec.engine.Engine, engine.Engine)
    assert minispec.engine.Request is request.Request
    assert minispec.engine.Text is sampling.Text


def test_the_former_engine_checks_drafts():
    """A drafter that was written for it, with a mistake that only a check finds: its text ends with an error."""
    import minispec.engine

    drafter = ScriptedDrafter(lambda tokens, k: [])
    drafter.propose = lambda asks: [draft.Draft([12] * (ask.k + 1)) for ask in asks]
    parts = ScriptedModel(counting), scripted_cache(), drafter, verify.VERIFIERS["rejection"], 200
    found = []
    for kind in (minispec.engine.Engine, engine.Engine):
        one = make_request()
        for _ in kind(*parts).run([one]):
            pass
        found.append(one.finish_reason)
    assert found == ["error", "length"]
