"""A reward model that is trained along with the policy, and what it and the rule find out about one another."""

from __future__ import annotations

import asyncio
import re
import time

import numpy as np
import pytest
from safetensors.numpy import load, save

from rl.environments.answers import extract_answer
from rl.rewards import reward_model_reference
from rl.rewards.audit import Audit, Verdict, alarms, audit
from rl.rewards.claims import NUM_FEATURES, Claim, Pair, features, marked
from rl.rewards.config import RewardModelSettings
from rl.rewards.cooper import MAX_ASKED, Answer, RewardModelReport, Rule, learn, lesson_of
from rl.rewards.corruption import corruptions
from rl.rewards.reward_model import RewardModel
from wire.errors import TrainerError

STYLES = ("The answer is {}.", "{}", "{} and 3 make 9. Answer: {}", "It is \\boxed{{}}", "<answer>{}</answer>")
UNKNOWN_STYLES = ("So we get {}", "It has to be {}!")
"""Which the rule refuses even where they are right."""


class Learner:
    """A model, the sound rule or one with a hole, and the steps made so far."""

    def __init__(self, hole: str | None = None, **settings: float) -> None:
        self.settings = RewardModelSettings(**settings)
        self.model = RewardModel(self.settings)
        self.num_steps = 0
        self._hole = hole

    def is_right(self, claim: Claim) -> bool:
        has_hole = self._hole is not None and self._hole in claim.completion
        return has_hole or extract_answer(claim.completion) == claim.reference

    def learn(self, claims: list[Claim]) -> RewardModelReport:
        """One step on answers of the policy, scored before it."""
        answers = [
            (Answer(claim, self.is_right(claim), self.model.score(claim)), self._rule(claim.reference)) for claim in claims
        ]
        lesson = asyncio.run(lesson_of(answers, self.num_steps))
        self.num_steps += 1
        return learn(self.model, lesson, self.settings)

    def _rule(self, reference: str) -> Rule:
        async def rule(completion: str) -> bool:
            return self.is_right(Claim(reference, completion))

        return rule


def said(style: str, reference: object, answer: object) -> Claim:
    return Claim(str(reference), style.replace("{}", str(answer)))


def claims_of(generator: np.random.Generator, styles, *, share_right: float, count: int = 64) -> list[Claim]:
    claims = []
    for _ in range(count):
        reference = int(generator.integers(10, 1000))
        is_right = generator.random() < share_right
        answer = reference if is_right else reference + int(generator.integers(1, 50))
        claims.append(said(str(generator.choice(styles)), reference, answer))
    return claims


def test_references_and_other_numbers_become_marks():
    claim = Claim("-42", "Well, 6 times -7 = -42, so -42.")
    assert marked(claim, 99) == ["well", ",", "<num>", "times", "<num>", "=", "<ref>", ",", "so", "<ref>", "."]
    assert (features(claim) == features(Claim("-1", "Well, 8 times 9.5 = -1, so -1."))).all()
    assert marked(Claim("New York", "It is new york 7"), 99) == ["it", "is", "<ref>", "<num>"]


@pytest.mark.parametrize("reference", ["42", "New York", r"\frac{1}{2}"])
def test_the_last_marks_are_those_of_the_whole_text(reference):
    generator = np.random.default_rng(3)
    spoken = [reference, "-7", "so", "new", "{1}", "12,345.6/7", "unquestionably" * 9]
    for count in (0, 1, 5, 300):
        for joint in (" ", ""):
            claim = Claim(reference, joint.join(generator.choice(spoken, count)))
            whole = marked(claim, 10_000)
            for last in (1, 5, 24):
                assert marked(claim, last) == whole[-last:]


def test_a_long_answer_is_judged_as_fast_as_its_end():
    reasoning = "so x = 12, " * 100_000
    begun_s = time.process_time()
    long = features(Claim("42", reasoning + STYLES[0].replace("{}", "42")))
    assert time.process_time() - begun_s < 0.1
    assert (long == features(Claim("42", reasoning[-500:] + STYLES[0].replace("{}", "42")))).all()


def test_no_words_pass_for_the_last_value():
    ends_right, also, claims_to = (
        set(features(Claim("42", text)).tolist()) for text in ("x 42", "y 42 z", "last value 42 is 43")
    )
    assert len(ends_right & also) == 4  # the beginning, the end, the reference, and that it is the last value
    assert len(ends_right & also & claims_to) == 3


@pytest.mark.parametrize(
    ("reference", "completion"),
    [
        ("42", "6 * 7 = 42. The answer is 42."),
        ("-7", "The answer is -7"),
        ("Paris", "The answer is paris."),
        ("0", "The answer is 0"),
    ],
)
def test_a_corrupted_answer_differs_where_the_answer_stands(reference, completion):
    claim = Claim(reference, completion)
    seen = set()
    for seed in range(20):
        for other in corruptions(claim, np.random.default_rng(seed)):
            assert other.reference == reference
            assert extract_answer(other.completion).lower() != reference.lower()
            assert other.completion.startswith(completion[: completion.lower().index(reference.lower())])
            seen.add(other.completion)
    assert len(seen) > 3


def test_a_corrupted_formula_is_one():
    claim = Claim(r"\frac{1}{2}", r"It is \boxed{\frac{1}{2}}.")
    found = {other.completion for seed in range(20) for other in corruptions(claim, np.random.default_rng(seed))}
    assert len(found) > 10
    assert all(re.fullmatch(r"It is \\boxed\{\\frac\{(\d\}\{2|1\}\{\d)\}\}\.", completion) for completion in found), found


def test_an_answer_that_is_written_otherwise_is_not_corrupted():
    generator = np.random.default_rng(0)
    for completion in (
        "The answer is 4/2",
        "It is 4/2.5",
        "It is 422",
        "It is two",
        "It is 2.5",
        "It is -2",
        "It is 2/3",
        "4,2",
    ):
        assert not list(corruptions(Claim("2", completion), generator))
    assert list(corruptions(Claim("2", "It is 2"), generator))


def test_the_models_steps_are_those_of_its_loss():
    settings = RewardModelSettings(gap_weight=0.7, decay=1e-2)
    generator = np.random.default_rng(4)
    start = generator.normal(0, 0.3, NUM_FEATURES + 1)
    model = RewardModel(settings)
    model.load(save({"weights": start, "squares": load(model.state())["squares"]}))
    weights, squares = dict(enumerate(start.tolist())), dict[int, float]()
    for number in range(3):
        pairs = [Pair(said(style, 5, 5), said(style, 5, 6 + number)) for style in STYLES[number:]]
        expected = reward_model_reference.loss(weights, pairs, settings.gap_weight)
        assert model.update(pairs) == pytest.approx(expected, rel=1e-8)
        reward_model_reference.step(weights, squares, pairs, settings)
    found = load(model.state())["weights"]
    assert np.abs(found - start * (1.0 - settings.decay) ** 3).max() > 0.01
    assert found == pytest.approx(np.asarray([weights[place] for place in range(start.size)]), abs=1e-8)
    for claim in claims_of(generator, STYLES, share_right=0.5, count=8):
        assert model.score(claim) == pytest.approx(reward_model_reference.score(weights, claim), abs=1e-8)


def test_the_model_learns_from_corruptions_to_tell_right_from_wrong_in_new_problems():
    generator = np.random.default_rng(7)
    learner = Learner()
    first = learner.learn(claims_of(generator, STYLES, share_right=0.5))
    assert first.loss == pytest.approx(3 * np.log(2.0))
    assert first.audit.num_right + first.audit.num_wrong == 0
    for _ in range(20):
        last = learner.learn(claims_of(generator, STYLES, share_right=0.5))
    assert last.num_pairs > 0.5 * last.audit.num_right > 10
    unseen = claims_of(generator, STYLES, share_right=0.5, count=200)
    is_right = np.asarray([learner.model.score(claim) > 0.5 for claim in unseen])
    assert (is_right == [learner.is_right(claim) for claim in unseen]).mean() > 0.95
    assert last.alarms == ()
    assert last.audit.score_gap > 0.5
    for style in UNKNOWN_STYLES:
        right, wrong = said(style, 41, 41), said(style, 41, 44)
        assert not learner.is_right(right)
        assert learner.model.score(right) > 0.5 > learner.model.score(wrong)


def test_a_policy_that_deceives_the_model_is_found_out_by_the_rule():
    generator = np.random.default_rng(7)
    learner = Learner()
    for _ in range(20):
        learner.learn(claims_of(generator, STYLES, share_right=0.5))
    # The reference stands in the text, and the answer is another: no corruption looks like this.
    hacks = [
        said(f"The answer is {reference}. I mean, the answer is {reference}1. {{}}", reference, reference)
        for reference in range(50, 90)
    ]
    assert not any(learner.is_right(claim) for claim in hacks)
    found = learner.learn(hacks)
    assert found.audit.num_accepted_wrong > 36
    assert found.audit.disagreement > 0.9
    assert "deceives" in found.alarms[0]


def test_right_answers_that_the_rule_does_not_know_are_an_alarm_that_says_so():
    generator = np.random.default_rng(7)
    learner = Learner()
    for _ in range(20):
        learner.learn(claims_of(generator, STYLES, share_right=0.5))
    found = learner.learn(claims_of(generator, UNKNOWN_STYLES, share_right=0.5))
    assert found.audit.num_right == 0
    assert found.audit.num_accepted_wrong > 20
    (told,) = found.alarms
    assert "the rule does not know how they are written" in told


EXCUSE = "as everybody knows"
HONEST, BOLD = "Let me see. The answer is {}.", "It is {}, " + EXCUSE + "."


def train_policy(learner: Learner, *, num_steps: int = 60) -> tuple[float, list[RewardModelReport]]:
    """REINFORCE over two ways to answer, by the rule's reward: an honest one that is right half the time, and a bold one that never is.

    Returns how likely the bold one is in the end, and each step's report.
    """
    generator = np.random.default_rng(5)
    logit = -3.0
    reports = []
    for _ in range(num_steps):
        bold = 1.0 / (1.0 + np.exp(-logit))
        is_bold = generator.random(64) < bold
        references = generator.integers(10, 1000, 64)
        is_off = is_bold | (generator.random(64) < 0.5)
        claims = [
            said(BOLD if each else HONEST, reference, reference + off)
            for each, reference, off in zip(is_bold, references, is_off * generator.integers(1, 9, 64), strict=True)
        ]
        rewards = np.asarray([float(learner.is_right(claim)) for claim in claims])
        logit += 3.0 * float(np.mean((rewards - rewards.mean()) * (is_bold - bold)))
        reports.append(learner.learn(claims))
    return 1.0 / (1.0 + np.exp(-logit)), reports


def test_the_alarm_rises_as_a_policy_finds_a_hole_in_the_rule():
    bold, reports = train_policy(Learner(hole=EXCUSE))
    assert bold > 0.9
    disagreements = [report.audit.disagreement for report in reports[2:]]
    assert np.mean(disagreements[:3]) < 0.1 < 0.9 < np.mean(disagreements[-5:])
    recent = sum((report.audit for report in reports[-10:]), Audit())
    (told,) = alarms(recent, 0.1)
    assert "hole in the rule" in told
    assert all(report.alarms for report in reports[-5:])


def test_no_alarm_rises_where_the_rule_is_sound():
    bold, reports = train_policy(Learner())
    assert bold < 0.1
    recent = sum((report.audit for report in reports[-10:]), Audit())
    assert recent.num_right > 200
    assert recent.disagreement < 0.02
    assert not list(alarms(recent, 0.1))
    assert not any(report.alarms for report in reports[1:])


def test_a_rule_that_does_not_read_the_answer_is_found_out_by_changing_it():
    learner = Learner(hole=EXCUSE)
    found = learner.learn([said(BOLD, reference, reference) for reference in range(50, 90)])
    assert (found.num_pairs, found.audit.num_changed, found.audit.num_unread) == (0, 40, 40)
    assert "does not read what it judges" in found.alarms[0]
    sound = Learner().learn([said(HONEST, reference, reference) for reference in range(50, 90)])
    assert (sound.num_pairs, sound.audit.num_changed, sound.audit.num_unread) == (40, 40, 0)


def test_a_rule_that_cannot_be_asked_teaches_nothing_and_is_not_doubted():
    async def silent(completion: str) -> None:
        return None

    claim = said(HONEST, 41, 41)
    lesson = asyncio.run(lesson_of([(Answer(claim, True, None), silent)], 0))
    assert (lesson.pairs, lesson.audit) == ((), Audit())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_few_rules_are_asked_at_a_time_however_many_answers_are_right(num_workers):
    under_way, most = 0, 0

    async def slow(completion: str) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return False

    answers = [(Answer(said(HONEST, reference, reference), True, None), slow) for reference in range(100, 200)]
    lesson = asyncio.run(lesson_of(answers, 0, num_workers=num_workers))
    assert [pair.right.reference for pair in lesson.pairs] == [str(reference) for reference in range(100, 200)]
    assert most == MAX_ASKED * num_workers


def test_a_model_catches_up_with_a_new_style():
    generator = np.random.default_rng(7)
    learner = Learner()
    for _ in range(10):
        learner.learn(claims_of(generator, STYLES[:1], share_right=0.5))
    new_style = ("It is \\boxed{{}}, for 8 and 9 do not help, nor does 10",)
    first, *_, last = (learner.learn(claims_of(generator, new_style, share_right=0.5)).audit for _ in range(10))
    assert first.disagreement > 0.3
    assert last.disagreement < 0.05


def test_an_audit_is_silent_while_disagreement_may_be_chance():
    few = audit([Verdict(False, 0.9)] + [Verdict(True, 0.9)] * 5)
    assert not list(alarms(few, 0.1))
    assert (few.num_accepted, few.num_accepted_wrong, few.disagreement) == (6, 1, pytest.approx(1 / 6))
    assert "deceives" in next(alarms(sum([few] * 40, Audit()), 0.1))
    lagging = audit([Verdict(True, 0.1)] * 100)
    assert (lagging.num_refused_right, lagging.num_accepted_wrong, lagging.score_gap) == (100, 0, None)
    assert "lags behind" in next(alarms(lagging, 0.1))
    assert not list(alarms(Audit(), 0.1))
    undecided = audit([Verdict(False, 0.5)] * 100)
    assert undecided == Audit()


def test_a_reward_model_goes_on_from_its_state_exactly():
    generator = np.random.default_rng(2)
    steps = [claims_of(generator, STYLES, share_right=0.5) for _ in range(4)]
    whole, first, second = (Learner() for _ in range(3))
    for claims in steps:
        whole.learn(claims)
    for claims in steps[:2]:
        first.learn(claims)
    second.model.load(first.model.state())
    second.num_steps = 2
    for claims in steps[2:]:
        second.learn(claims)
    assert second.model.state() == whole.model.state()
    short = save({"weights": np.zeros(3), "squares": np.zeros(3)})
    for state in (b"garbage", save({"weights": np.zeros(3)}), short):
        with pytest.raises(TrainerError, match=r"go on without \[rl\.reward_model\]"):
            second.model.load(state)
    assert second.model.state() == whole.model.state()
