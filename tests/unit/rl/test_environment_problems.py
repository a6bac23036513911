"""Which problems there are, on which side of the split, and what answers to them are worth."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rl.environments.answers import extract_answer
from rl.environments.interface import Action, Chat, Environment, EnvironmentFailed, Observation, Scored, Split, Text
from rl.environments.procedural import brevity, last_number
from rl.environments.registry import build, read_environments
from rl.environments.splits import HELDOUT_FRACTION, Divided, draw, split_of
from wire.errors import ConfigError

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the package reasoning-gym is not installed"
)
PROCEDURAL = [
    {"kind": "addition"},
    {"kind": "addition", "style": "few_shot"},
    {"kind": "maximum"},
    {"kind": "maximum", "style": "few_shot"},
    {"kind": "upper_case"},
    {"kind": "brevity"},
    {"kind": "tools"},
    pytest.param({"kind": "reasoning_gym", "task": "chain_sum"}, marks=needs_reasoning_gym),
]


def environment(**table: Any) -> Environment:
    (config,) = read_environments([{"name": "test", **table}], source="test")
    return build(config)


def text_of(observation: Observation | None) -> str:
    if isinstance(observation, Text):
        return observation.text
    assert isinstance(observation, Chat)
    return observation.messages[-1].content


def seen(built: Environment, seed: int, split: Split) -> str:
    return text_of(asyncio.run(built.reset(seed, split)).first.observation)


def answered(built: Environment, text: str, *, seed: int = 0, is_truncated: bool = False) -> Scored:
    async def play() -> Scored:
        episode = await built.reset(seed, "train")
        step = await episode.step(Action(text, is_truncated=is_truncated))
        assert step.is_done
        return await episode.score()

    return asyncio.run(play())


@pytest.mark.parametrize("table", PROCEDURAL)
def test_a_seed_is_the_same_problem_in_every_process_and_another_seed_another(table: dict[str, Any]) -> None:
    one, other = environment(**table), environment(**table)
    texts = [seen(one, seed, "train") for seed in range(12)]
    assert texts == [seen(other, seed, "train") for seed in range(12)]
    assert len(set(texts)) > 6


@pytest.mark.parametrize("table", PROCEDURAL)
def test_what_an_environment_calls_the_right_answer_is_one(table: dict[str, Any]) -> None:
    built = environment(**table)
    references = [answered(built, "", seed=seed).reference for seed in range(6)]
    if table.get("style") == "few_shot" or table["kind"] in ("upper_case", "brevity"):
        assert references == [None] * 6
        return
    for seed, reference in enumerate(references):
        assert answered(built, f"The answer is {reference}.", seed=seed).parts[0].value == 1.0
        assert answered(built, f"The answer is {reference}1.", seed=seed).parts[0].value == 0.0


@pytest.mark.parametrize("table", PROCEDURAL)
def test_no_seed_brings_a_held_out_problem_into_training(table: dict[str, Any]) -> None:
    built = environment(**table)

    def asked(split: Split) -> set[str]:
        """The last line is the problem; what stands above it are instructions and examples."""
        return {seen(built, seed, split).splitlines()[-1] for seed in range(300)}

    assert asked("train").isdisjoint(asked("heldout"))


def test_examples_of_a_prompt_are_no_held_out_problems_and_not_its_own() -> None:
    built = environment(kind="addition", style="few_shot")
    for split in ("train", "heldout"):
        for seed in range(100):
            *examples, asked = seen(built, seed, split).splitlines()
            questions = [example.rpartition("=")[0] + "=" for example in examples]
            assert len({*questions, asked}) == 4
            assert {split_of(question) for question in questions} == {"train"}


def test_a_fifth_is_held_out() -> None:
    share = sum(split_of(f"problem {number}") == "heldout" for number in range(5000)) / 5000
    assert share == pytest.approx(HELDOUT_FRACTION, abs=0.03)


def test_an_environment_without_problems_of_a_split_fails() -> None:
    only = next(text for text in map(str, range(100)) if split_of(text) == "train")
    with pytest.raises(EnvironmentFailed, match="heldout"):
        draw(0, "heldout", lambda seed: only, str)
    with pytest.raises(EnvironmentFailed, match="heldout"):
        Divided([only], str).pick(0, "heldout")
    assert draw(0, "train", lambda seed: only, str) == Divided([only], str).pick(7, "train") == only


def test_a_collection_is_asked_for_its_texts_once_and_keeps_its_order() -> None:
    problems = [f"problem {number}" for number in range(200)]
    read: list[str] = []

    def text_of(problem: str) -> str:
        read.append(problem)
        return problem

    collection = Divided(problems, text_of)
    splits: tuple[Split, ...] = ("train", "heldout")
    for split in splits:
        part = [problem for problem in problems if split_of(problem) == split]
        assert len(part) > 20
        assert [collection.pick(seed, split) for seed in range(400)] == [part[seed % len(part)] for seed in range(400)]
    assert read == problems


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("  7.\n", "7"),
        ("The answer is 7.", "7"),
        ("So it is 5.\nFinal answer: **12**", "12"),
        ("<answer>a b</answer> and not 9", "a b"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        (r"thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        ("I add 3 and 4\n7", "7"),
        ("It is 3 or 4", "It is 3 or 4"),
        ("<answer>1</answer> or <answer>never closed", "1"),
        ("<answer>1</answer></answer>", "1"),
        ("</answer> 1", "</answer> 1"),
        ("The answer is:\n7", "7"),
        ("", ""),
        (r"never closed \boxed{3", r"never closed \boxed{3"),
    ],
)
def test_an_answer_is_what_the_text_commits_itself_to(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("piece", ["<answer>", "answer is ", "answer:\n", "\\boxed{", "answer \n", " ", "```python\n"])
def test_a_long_text_of_any_kind_is_read_in_linear_time(piece: str) -> None:
    """Quadratic reading would take these minutes."""
    text = piece * (1_000_000 // len(piece))
    begun_s = time.process_time()
    extract_answer(text)
    assert time.process_time() - begun_s < 10


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", "7"),
        ("The answer is 7.", "7"),
        ("3 + 4 = 7", "7"),
        ("007", "7"),
        ("-0", "-0"),
        ("7, I say 7", "7"),
        ("6 or 7 or 8", ""),
        ("7.5", ""),
        ("x7", ""),
        ("9" * 9000, "9" * 9000),
        ("", ""),
    ],
)
def test_a_number_counts_where_it_is_the_only_one(text: str, number: str) -> None:
    assert last_number(text) == number


def test_addition_rewards_the_sum_and_no_list_of_guesses() -> None:
    built = environment(kind="addition")
    words = seen(built, 0, "train").split()
    total = int(words[2]) + int(words[4].rstrip("?"))
    assert answered(built, f"{words[2]} + {words[4]} = {total}").reward == 1.0
    assert answered(built, str(total + 1)).reward == 0.0
    assert answered(built, " ".join(map(str, range(20)))).reward == 0.0


def test_few_shot_answers_end_with_their_line() -> None:
    built = environment(kind="upper_case")
    word = seen(built, 0, "train").splitlines()[-1].split()[0]
    assert answered(built, f" {word.upper()}\nfoo -> FOO").reward == 1.0
    assert answered(built, f" {word}").reward == 0.0
    assert answered(built, f" {word.upper()} {word}").reward == 0.0


def test_the_largest_number_is_worth_one() -> None:
    built = environment(kind="maximum")
    listed = seen(built, 0, "train").partition(":")[2].partition("?")[0]
    assert answered(built, f"It is {max(map(int, listed.split(',')))}").reward == 1.0
    assert answered(built, f"It is {min(map(int, listed.split(',')))}").reward == 0.0


def test_brevity_is_worth_more_the_nearer_it_comes_and_silence_nothing() -> None:
    rewards = [brevity(num_words, 5) for num_words in range(1, 25)]
    assert rewards[:5] == [1.0] * 5
    assert all(a > b for a, b in pairwise(rewards[4:20]))
    assert rewards[19:] == [0.0] * 5
    assert brevity(0, 5) == 0.0
    built = environment(kind="brevity", max_words=5)
    assert answered(built, "Wet and blue.").reward == 1.0
    assert answered(built, "Wet and", is_truncated=True).reward == 0.5
    assert answered(built, " ...").reward == 0.0


@needs_reasoning_gym
def test_reasoning_gym_pays_for_right_answers_only() -> None:
    """The library gives the padded answer credit; here it earns nothing, and nothing for being shorter."""
    built = environment(kind="reasoning_gym", task="lcm")
    episode: Any = asyncio.run(built.reset(0, "train"))
    entry = episode._problem
    right = entry.entry["answer"]
    padded = f"{right} or perhaps something else"
    assert 0.0 < entry.dataset.score_answer(padded, entry.entry) < 1.0
    assert answered(built, f"I computed it.\nThe answer is {right}.").reward == 1.0
    assert answered(built, f"<answer>{right}</answer>").reward == 1.0
    assert answered(built, padded).reward == 0.0
    assert answered(built, f"The answer is {right} or {int(right) + 1}").reward == 0.0
    assert answered(built, "").reward == 0.0


@needs_reasoning_gym
@pytest.mark.parametrize("task", ["propositional_logic", "fraction_simplification", "power_function", "basic_arithmetic"])
def test_no_scorer_gives_anything_between(task: str) -> None:
    built = environment(kind="reasoning_gym", task=task)
    for text in ("P", "3", "the answer is 1/2", "(((", "9" * 5000, "\x00", "None", "{}"):
        assert answered(built, text).reward in (0.0, 1.0)


@needs_reasoning_gym
@pytest.mark.parametrize("task", ["binary_matrix", "n_queens", "countdown", "puzzle24"])
def test_no_answer_is_run_as_a_program(task: str, tmp_path: Path) -> None:
    built = environment(kind="reasoning_gym", task=task)
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'w').write('x')"
    for answer in (program, f"[{program}]", f"(1).__class__ and {program}", f"().__class__.__base__ or {program}"):
        assert answered(built, f"<answer>{answer}</answer>").reward == 0.0
    assert not ran.exists()


@needs_reasoning_gym
def test_every_scorer_that_runs_answers_is_disarmed_or_refused() -> None:
    """The package's sources name them; what else they run is their own."""
    from rl.environments.reasoning_gym import _HARMLESS_READERS, _REFUSED_TASKS

    found = importlib.util.find_spec("reasoning_gym")
    assert found is not None
    assert found.origin is not None
    runs = re.compile(r"(?:\beval|\bexec|\bparse_expr|\bsympify)\((?:answer|user_\w+|predicted_\w+|cleaned_\w+)\b")
    package = Path(found.origin).parent
    running = {path.stem for path in package.rglob("*.py") if runs.search(path.read_text(encoding="utf-8"))}
    assert running == {*_HARMLESS_READERS, *_REFUSED_TASKS}
    for task in _REFUSED_TASKS:
        with pytest.raises(ConfigError, match="outside any sandbox"):
            environment(kind="reasoning_gym", task=task)


@needs_reasoning_gym
def test_arithmetic_is_still_read() -> None:
    built = environment(kind="reasoning_gym", task="countdown")
    episode: Any = asyncio.run(built.reset(0, "train"))
    assert answered(built, f"<answer>{episode._problem.entry['metadata']['expression']}</answer>").reward == 1.0
    puzzle: Any = environment(kind="reasoning_gym", task="puzzle24")
    entry = asyncio.run(puzzle.reset(0, "train"))._problem
    assert entry.dataset.score_answer("9 * 5 / 2 + 2", entry.entry) < 1.0
    assert entry.dataset.score_answer("8 * 3 * 1 * 1", entry.entry) == 1.0
