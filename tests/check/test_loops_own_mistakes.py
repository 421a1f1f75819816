"""Mistakes of a loop's own: a step that is trained again, a schedule of the steps that are left, lost variables."""

from __future__ import annotations

from tierd.check.launch_records import CheckedRun, Observation, RankRecord, StateCapture
from tierd.check.resume_findings import launch_findings
from tierd.check.value_leaves import ValueLeaf

RATE = 'state["optimizer"]["param_groups"][0]["lr"]'
KINDS = {'state["model"]': "weights", 'state["optimizer"]': "optimizer"}
FORMS = {'state["model"]': "object", 'state["optimizer"]': "object"}
CROPS = "Crops of the DataLoader of Crops (40 items).random"
SAMPLER = "RandomSampler of the DataLoader of Crops (40 items).generator"


def leaf(value: object) -> ValueLeaf:
    return ValueLeaf(str(value), str(value), len(value) if isinstance(value, list) else None)


def at(
    step: int, moment: str, weight: object, rate: float = 0.1, after: int | None = None, **more: object
) -> StateCapture:
    entries = {'state["model"]["weight"]': leaf(weight), RATE: leaf(rate)}
    own = {
        path: ValueLeaf(leaf(value).digest, leaf(value).text, leaf(value).count, saved=False)
        for path, value in more.items()
    }
    how = "restore" if moment == "loaded" else "save"
    return StateCapture(step, moment, entries, {}, own, KINDS, FORMS, (how, step), user_paths=sorted(own), after=after)


def found(what: str, whole: list[StateCapture], killed: list[StateCapture], begun: int = 5) -> list[tuple[str, str]]:
    def rank(first: int, taken: list[StateCapture]) -> RankRecord:
        seen = RankRecord(captures=list(taken))
        for step in range(first, 9):
            seen.observations[step] = Observation(step, (step,))
        return seen

    killed_run = CheckedRun([[rank(1, [])], [rank(begun, killed)]])
    return [(one.kind, one.path) for one in launch_findings(CheckedRun([[rank(1, whole)]]), killed_run, 0, 2, what)]


def test_a_step_that_the_checkpoint_holds_and_that_is_trained_again_is_named():
    whole = [at(4, "step", "w4"), at(5, "step", "w5"), at(4, "save", "w5", after=5), at(5, "forward", "w5")]
    assert found("first loss", whole, [at(4, "loaded", "w5"), at(4, "forward", "w5")]) == [("steps", "step")]


def test_a_step_that_was_saved_between_its_observation_and_its_update_is_trained_rightly():
    whole = [at(4, "step", "w3"), at(5, "step", "w4"), at(4, "save", "w4", after=5), at(5, "forward", "w5")]
    killed = [at(4, "loaded", "w4"), at(4, "forward", "w4")]
    assert ("steps", "step") in found("first loss", whole, killed)
    early = [at(4, "step", "w4"), at(5, "step", "w5"), at(4, "save", "w4", after=5), at(5, "forward", "w5")]
    assert ("steps", "step") not in found("first loss", early, killed)


def test_a_rate_that_was_right_before_the_first_step_and_not_after_it_is_the_schedules():
    whole = [at(4, "step", "w4"), at(4, "save", "w4"), at(4, "forward", "w4"), at(5, "step", "w5", 0.08)]
    killed = [at(4, "loaded", "w4"), at(4, "forward", "w4"), at(5, "step", "w5", 0.05)]
    assert found("later loss", whole, killed) == [("optimizer", RATE)]
    right = [at(4, "loaded", "w4"), at(4, "forward", "w4"), at(5, "step", "w5", 0.08)]
    assert found("later loss", whole, right) == []


def test_lost_attribute_is_named_before_a_rate_that_follows_from_it():
    tokens = {"Loop.tokens": 40}
    whole = [at(4, "step", "w4", **tokens), at(4, "save", "w4", **tokens), at(4, "forward", "w4", **tokens)]
    whole += [at(5, "step", "w5", 0.08)]
    lost = {"Loop.tokens": 0}
    killed = [at(4, "loaded", "w4", **lost), at(4, "forward", "w4", **lost), at(5, "step", "w5", 0.05)]
    assert found("later loss", whole, killed) == [("not in the checkpoint", "Loop.tokens")]


def test_a_lost_memory_explains_other_samples_and_the_generator_that_drew_from_it_does_not():
    memory = {"Memory.rows": [1, 2, 3, 4]}
    torch_generator = {"torch's CPU generator": "generator a"}
    whole = [at(4, "save", "w", **memory, **torch_generator), at(4, "step", "w", **memory, **torch_generator)]
    whole += [at(4, "forward", "w", **memory, **{"torch's CPU generator": "generator b"})]
    killed = [at(4, "loaded", "w", **{"Memory.rows": []}, **torch_generator)]
    killed += [at(4, "forward", "w", **{"Memory.rows": [4]}, **{"torch's CPU generator": "generator c"})]
    assert found("samples", whole, killed)[0] == ("not in the checkpoint", "Memory.rows")


def test_the_generator_of_a_dataset_explains_a_loss_and_that_of_a_sampler_does_not():
    def with_loader(moment: str, dataset: str, order: str) -> StateCapture:
        taken = at(4, moment, "w")
        loaders = {path: ValueLeaf(text, f"generator {text}") for path, text in ((CROPS, dataset), (SAMPLER, order))}
        return StateCapture(4, moment, taken.entries, {}, {}, KINDS, FORMS, taken.note, loaders)

    whole = [with_loader("save", "a", "s"), with_loader("forward", "b", "s")]
    killed = [with_loader("loaded", "x", "t"), with_loader("forward", "y", "t")]
    assert found("first loss", whole, killed) == [("generator", CROPS)]


def test_gradients_are_named_where_a_framework_loads_later():
    gradient = 'gradient of Net["weight"]'

    def taken(moment: str, form: str, there: bool) -> StateCapture:
        gradients = {gradient: leaf("g")} if there else {}
        entries = {} if moment == "backward" else at(4, moment, "w").entries
        return StateCapture(4, moment, entries, {}, gradients, KINDS, {'state["model"]': form}, ("save", 4))

    whole = [taken("save", "object", True), taken("forward", "object", True), taken("backward", "", True)]
    killed = [taken("loaded", "values", False), taken("forward", "object", False), taken("backward", "", False)]
    assert found("later loss", whole, killed) == [("gradients", gradient)]
