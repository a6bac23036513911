from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from rl_samples import make_trajectory, make_turn
from safetensors.numpy import save

from rl.environments.answers import extract_answer
from rl.rewards.audit import Verdict, audit
from rl.rewards.claims import Claim, features, marked
from rl.rewards.combination import combine
from rl.rewards.config import RewardModelSettings, RewardSettings
from rl.rewards.cooper import Cooper
from rl.rewards.corruption import corrupt
from rl.rewards.length_guard import length_report
from rl.rewards.reward_model import RewardModel
from rl.trajectory import Group, RewardPart
from wire.errors import RolloutError, TrainerError

STYLES = ("The answer is {}.", "{}", "{} and 3 make 9. Answer: {}", "It is \\boxed{{}}", "<answer>{}</answer>")
UNKNOWN_STYLES = ("So we get {}", "It has to be {}!")
"""Which the rule refuses even where they are right."""
QUESTION = "How much is it?"


def rule(claim: Claim) -> bool:
    return extract_answer(claim.completion) == claim.reference


def said(style: str, reference: object, answer: object) -> Claim:
    return Claim(QUESTION, str(reference), style.replace("{}", str(answer)))


def claims_of(generator: np.random.Generator, styles, *, share_right: float, count: int = 64) -> list[Claim]:
    claims = []
    for _ in range(count):
        reference = int(generator.integers(10, 1000))
        is_right = generator.random() < share_right
        answer = reference if is_right else reference + int(generator.integers(1, 50))
        claims.append(said(str(generator.choice(styles)), reference, answer))
    return claims


def test_weights_of_the_run_replace_the_environments_and_nothing_is_left_out():
    parts = [RewardPart("correct", 1.0), RewardPart("brevity", 0.5, 0.5), RewardPart("seen", 1.0, 0.0)]
    settings = RewardSettings(weights={"brevity": 0.2, "seen": 0.1})
    assert combine(parts, settings) == (
        RewardPart("correct", 1.0),
        RewardPart("brevity", 0.5, 0.2),
        RewardPart("seen", 1.0, 0.1),
    )


def test_a_condition_keeps_a_part_from_counting_where_the_answer_is_wrong():
    settings = RewardSettings(only_if={"brevity": "correct"})

    def total(correct: float) -> float:
        return make_trajectory(
            reward_parts=combine([RewardPart("correct", correct), RewardPart("brevity", 0.5)], settings)
        ).reward

    assert (total(1.0), total(0.9), total(0.0)) == (1.5, 0.9, 0.0)
    with pytest.raises(RolloutError, match=r"only_if\.brevity"):
        combine([RewardPart("brevity", 0.5)], settings)
    with pytest.raises(RolloutError, match="different names"):
        combine([RewardPart("correct", 0.5), RewardPart("correct", 1.0)], settings)


def groups_of(rollouts: list[list[tuple[int, float, float]]]) -> list[Group]:
    """By group: (tokens, what the rule says, what else is earned)."""
    return [
        Group(
            trajectories=tuple(
                make_trajectory(
                    group_id=number,
                    sample_index=index,
                    turns=(make_turn([0] * length),),
                    reward_parts=(RewardPart("correct", right), RewardPart("model", more)),
                )
                for index, (length, right, more) in enumerate(members)
            )
        )
        for number, members in enumerate(rollouts)
    ]


def test_reward_that_grows_with_length_among_equally_right_answers_is_an_alarm():
    hacked = groups_of([[(4 + k + g, float(k % 2), 0.05 * k) for k in range(8)] for g in range(4)])
    found = length_report(hacked, "correct", 0.3)
    assert found.among_equally_right.correlation == pytest.approx(1.0)
    assert len(found.alarms) == 1
    assert "longer" in found.alarms[0]
    lazy = groups_of([[(20 - k, 1.0, 0.05 * k) for k in range(8)] for _ in range(4)])
    assert "shorter" in length_report(lazy, "correct", 0.3).alarms[0]


def test_length_by_prompt_or_by_chance_is_none():
    generator = np.random.default_rng(3)
    hard_is_long = groups_of(
        [[(5 * g + int(n), float(r), 0.0) for n, r in generator.integers(1, (6, 2), (8, 2))] for g in range(1, 9)]
    )
    noise = groups_of([[(int(n), float(r), 0.0) for n, r in generator.integers((1, 0), (9, 2), (8, 2))] for _ in range(16)])
    for groups in (hard_is_long, noise):
        found = length_report(groups, "correct", 0.3)
        assert found.alarms == ()
        assert found.among_equally_right.num_rollouts == 0


def test_right_answers_that_are_longer_are_told_from_length_for_its_own_sake():
    groups = groups_of([[(4 + 4 * (k % 2) + k // 4, float(k % 2), 0.0) for k in range(8)] for _ in range(4)])
    found = length_report(groups, "correct", 0.3)
    assert found.among_group.correlation > 0.9
    assert found.among_equally_right.num_rollouts == 0
    assert "right more often" in found.alarms[0]


def test_the_correlation_is_pearsons_of_deviations_from_the_groups_means():
    generator = np.random.default_rng(1)
    drawn = [
        [(int(n), 0.0, round(float(x), 3)) for n, x in zip(generator.integers(1, 9, 6), generator.random(6), strict=True)]
        for _ in range(5)
    ]
    centred = [np.asarray([(n, x) for n, _, x in members]) - np.mean([(n, x) for n, _, x in members], 0) for members in drawn]
    wanted = np.corrcoef(np.concatenate(centred).T)[0, 1]
    assert length_report(groups_of(drawn), "correct", 0.3).among_group.correlation == pytest.approx(wanted)


def test_a_forked_rollout_is_one_observation_as_long_as_all_its_trajectories():
    drawn = [[(3 + (5 * k + g) % 7, 1.0, round(0.1 * ((3 * k + g) % 5), 1)) for k in range(6)] for g in range(4)]
    whole = groups_of([[(3 * length, right, more) for length, right, more in members] for members in drawn])
    forked = [
        Group(
            trajectories=(
                *group.trajectories,
                *(
                    structs.replace(before, sample_index=6 * fork + index, forked_from=6 * (fork - 1) + index)
                    for fork in (1, 2)
                    for index, before in enumerate(group.trajectories)
                ),
            )
        )
        for group in groups_of(drawn)
    ]
    found = length_report(forked, "correct", 0.3)
    assert found.among_group.num_rollouts == 24
    assert found == length_report(whole, "correct", 0.3)


def test_chance_is_called_chance_however_small_the_groups_are():
    generator = np.random.default_rng(0)

    def p_value() -> float:
        pairs = [
            [(int(n), 0.0, float(x)) for n, x in zip(generator.permutation(40)[:2] + 1, generator.random(2), strict=True)]
            for _ in range(12)
        ]
        return length_report(groups_of(pairs), "correct", 0.3).among_group.p_value

    assert np.mean([p_value() < 0.1 for _ in range(200)]) == pytest.approx(0.1, abs=0.06)


def test_references_and_other_numbers_become_marks():
    claim = Claim(QUESTION, "-42", "Well, 6 times -7 = -42, so -42.")
    assert marked(claim) == ["well", ",", "<num>", "times", "<num>", "=", "<ref>", ",", "so", "<ref>", "."]
    assert (features(claim) == features(Claim(QUESTION, "-1", "Well, 8 times 9.5 = -1, so -1."))).all()
    assert marked(Claim(QUESTION, "New York", "It is new york 7")) == ["it", "is", "<ref>", "<num>"]


@pytest.mark.parametrize(
    ("reference", "completion"),
    [
        ("42", "6 * 7 = 42. The answer is 42."),
        ("-7", "The answer is -7"),
        ("Paris", "The answer is paris."),
        ("0", "The answer is 0"),
    ],
)
def test_a_corrupted_answer_differs_where_the_answer_stands_and_is_refused(reference, completion):
    claim = Claim(QUESTION, reference, completion)

    def is_right(text: str) -> bool:
        return extract_answer(text).lower() == reference.lower()

    assert is_right(completion)
    seen = set()
    for seed in range(20):
        wrong = corrupt(claim, is_right, np.random.default_rng(seed))
        assert wrong is not None
        assert not is_right(wrong.completion)
        assert wrong.completion.startswith(completion[: completion.lower().index(reference.lower())])
        seen.add(wrong.completion)
    assert len(seen) > 3


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
        assert corrupt(Claim(QUESTION, "2", completion), lambda text: False, generator) is None
    assert corrupt(Claim(QUESTION, "2", "It is 2"), lambda text: True, generator) is None


def test_the_models_gradient_is_that_of_its_loss():
    settings = RewardModelSettings(learning_rate=1e-9, decay=0.0, gap_weight=0.7)
    model = RewardModel(settings)
    generator = np.random.default_rng(4)
    size = model.tensors()["weights"].size
    start = {"weights": generator.normal(0, 0.3, size), "squares": np.ones(size)}
    pairs = [(said(style, 5, 5), said(style, 5, 6)) for style in STYLES]
    model.load(start)
    model.update(pairs)
    gradient = np.sqrt(np.maximum(model.tensors()["squares"] - 1.0, 0.0))  # AdaGrad's squares hold it, without its sign
    touched = np.argsort(-gradient)[:20]
    assert gradient[touched].min() > 1e-3
    for index in touched:
        losses = []
        for shift in (1e-5, -1e-5):
            weights = start["weights"].copy()
            weights[index] += shift
            model.load(start | {"weights": weights})
            losses.append(model.update(pairs))
        assert abs(losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[index], rel=1e-4)


def test_the_model_learns_from_corruptions_to_tell_right_from_wrong_in_new_problems():
    generator = np.random.default_rng(7)
    cooper = Cooper(RewardModelSettings(weight=0.5), rule, seed=0)
    first = cooper.learn(claims_of(generator, STYLES, share_right=0.5))
    assert first.loss == pytest.approx(3 * np.log(2.0))
    for _ in range(20):
        last = cooper.learn(claims_of(generator, STYLES, share_right=0.5))
    assert last.num_pairs > 0.5 * last.num_right
    unseen = claims_of(generator, STYLES, share_right=0.5, count=200)
    is_right = np.asarray([cooper.parts(claim)[0].value >= 0.5 for claim in unseen])
    assert (is_right == [rule(claim) for claim in unseen]).mean() > 0.95
    assert last.audit.alarms == ()
    assert last.audit.score_gap > 0.5
    for style in UNKNOWN_STYLES:
        right, wrong = said(style, 41, 41), said(style, 41, 44)
        assert not rule(right)
        assert cooper.model.score(right) > 0.5 > cooper.model.score(wrong)
    model, watched = cooper.parts(unseen[0])
    assert (model.weight, watched.weight, watched.value) == (0.5, 0.0, float(rule(unseen[0])))


def test_a_policy_that_deceives_the_model_is_found_out_by_the_rule():
    generator = np.random.default_rng(7)
    cooper = Cooper(RewardModelSettings(), rule, seed=0)
    for _ in range(20):
        cooper.learn(claims_of(generator, STYLES, share_right=0.5))
    # The reference stands in the text, and the answer is another: no corruption looks like this.
    hacks = [
        said(f"The answer is {reference}. I mean, the answer is {reference}1. {{}}", reference, reference)
        for reference in range(50, 90)
    ]
    assert not any(rule(claim) for claim in hacks)
    found = cooper.learn(hacks).audit
    assert found.accepted_wrong > 0.9
    assert "deceives" in found.alarms[0]


def test_a_model_catches_up_with_a_new_style():
    generator = np.random.default_rng(7)
    cooper = Cooper(RewardModelSettings(), rule, seed=0)
    for _ in range(10):
        cooper.learn(claims_of(generator, STYLES[:1], share_right=0.5))
    new_style = ("Let me think. 8 and 9 do not help, nor does 10. Answer: {}",)
    first, *_, last = (cooper.learn(claims_of(generator, new_style, share_right=0.5)).audit for _ in range(10))
    assert max(first.refused_right, first.accepted_wrong) > 0.5
    assert last.refused_right < 0.05
    assert last.accepted_wrong < 0.05


def test_an_audit_is_silent_while_disagreement_may_be_chance():
    few = [Verdict(False, 0.9)] + [Verdict(True, 0.9)] * 5
    assert audit(few, 0.1).alarms == ()
    assert audit(few, 0.1).accepted_wrong == pytest.approx(1 / 6)
    assert "deceives" in audit(few * 40, 0.1).alarms[0]
    lagging = [Verdict(True, 0.1)] * 100
    found = audit(lagging, 0.1)
    assert (found.refused_right, found.accepted_wrong, found.score_gap) == (1.0, 0.0, None)
    assert "lags behind" in found.alarms[0]
    assert audit([], 0.1).alarms == ()


def test_a_reward_model_goes_on_from_its_state_exactly():
    generator = np.random.default_rng(2)
    steps = [claims_of(generator, STYLES, share_right=0.5) for _ in range(4)]
    whole, first, second = (Cooper(RewardModelSettings(), rule, seed=3) for _ in range(3))
    for claims in steps:
        whole.learn(claims)
    for claims in steps[:2]:
        first.learn(claims)
    second.load(first.state())
    for claims in steps[2:]:
        second.learn(claims)
    assert second.state() == whole.state()
    many_steps = save(second.model.tensors() | {"num_steps": np.arange(2)})
    for state in (b"garbage", many_steps, save(second.model.tensors())):
        with pytest.raises(TrainerError, match="no state"):
            second.load(state)
    assert second.state() == whole.state()
