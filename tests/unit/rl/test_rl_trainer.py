from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from rl_samples import make_trajectory
from tiny_policy import VOCAB, alternating, batch_of, draw, draw_group, make_trainer, weights_of, write_policy

from rl.trainer.batch import make_batch
from rl.trainer.packs import make_packs
from rl.trainer.sharing import can_share_prompts
from rl.trajectory import Group, RewardPart
from wire.errors import ConfigError, RolloutError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "model")


def gradients_of(trainer):
    """Of the first step, from AdamW's first moment."""
    tensors = trainer.tensors()
    return {name: tensors[f"exp_avg.{name}"] / 0.1 for name in trainer.policy.parameters()}


def reinforce_gradient(model, groups):
    """-1/tokens sum A grad log pi, each token by a pass of its own over what came before it."""
    tokens = sum(trajectory.num_output_tokens for group in groups for trajectory in group.trajectories)
    total = torch.zeros(())
    for group in groups:
        mean = sum(trajectory.reward for trajectory in group.trajectories) / len(group.trajectories)
        for trajectory in group.trajectories:
            context: list[int] = []
            for turn in trajectory.turns:
                context += turn.prompt_token_ids
                for token in turn.output_token_ids:
                    logits_V = model(input_ids=torch.tensor([context])).logits[0, -1] / trajectory.temperature
                    total = total - (trajectory.reward - mean) * logits_V.log_softmax(-1)[token] / tokens
                    context.append(token)
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(total, list(names.values())), strict=True))


def two_turn_group(trainer, generator):
    trajectories = []
    for index, temperature in enumerate((0.7, 1.3, 1.0)):
        first = draw(trainer, [4, 5], 2 + index, temperature, generator)
        seen = [*first.prompt_token_ids, *first.output_token_ids, 9, 8]
        second = replace(draw(trainer, seen, 3, temperature, generator), prompt_token_ids=(9, 8))
        trajectories.append(
            make_trajectory(
                group_id=9,
                sample_index=index,
                temperature=temperature,
                turns=(first, second),
                reward_parts=(RewardPart("right", float(index == 1)),),
            )
        )
    return Group(trajectories=tuple(trajectories))


@pytest.mark.parametrize("pack_tokens", [1, 20, 4096])
def test_the_gradient_of_a_step_is_reinforces_however_it_is_packed(model_dir, pack_tokens):
    trainer = make_trainer(model_dir, pack_tokens=pack_tokens)
    groups = [*batch_of(trainer, 0), two_turn_group(trainer, torch.Generator().manual_seed(5))]
    wanted = reinforce_gradient(trainer.policy.model, groups)
    report = trainer.step(groups)
    assert report.num_tokens == sum(t.num_output_tokens for group in groups for t in group.trajectories)
    found = gradients_of(trainer)
    assert found.keys() == wanted.keys()
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    norm = float(torch.cat([gradient.flatten() for gradient in wanted.values()]).norm())
    assert report.updates[0].grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("pack_tokens", [1, 9, 30, 4096])
def test_all_layouts_give_a_token_the_same_probability(model_dir, pack_tokens):
    trainer = make_trainer(model_dir)
    groups = [*batch_of(trainer, 0), two_turn_group(trainer, torch.Generator().manual_seed(5))]
    samples = make_batch(groups, trainer.algorithm, max_output_tokens=16).samples
    rows = [0, 1, 2, 4, 6, 8, 9, 10]
    for share_prompts in (False, True):
        packs = make_packs(samples, rows, pack_tokens, share_prompts=share_prompts)
        assert sorted(row for pack in packs for row in pack.rows_B.tolist()) == rows
        assert all(pack.tokens_RL.numel() <= pack_tokens or len(pack.rows_B) == 1 for pack in packs)
        found_NS = torch.zeros(len(samples), 16)
        for pack in packs:
            with torch.no_grad():
                pack.put(trainer.policy.score(pack)[0], found_NS)
        for row in rows:
            sample = samples[row]
            logprobs = found_NS[row, : sample.num_outputs].tolist()
            assert logprobs == pytest.approx(sample.behaviour_logprobs, abs=5e-6)
            assert not found_NS[row, sample.num_outputs :].any()


def test_a_shared_prompt_is_computed_once(model_dir):
    trainer = make_trainer(model_dir)
    group = draw_group(trainer, 0, list(range(1, 21)), [3, 5, 7], alternating(), torch.Generator().manual_seed(1))
    samples = make_batch([group], trainer.algorithm, max_output_tokens=16).samples
    (pack,) = make_packs(samples, range(3), 64, share_prompts=True)
    assert pack.tokens_RL.shape == (1, 20 + 2 + 4 + 6)
    assert len(pack.kept_K) == 1 + 2 + 4 + 6  # all first tokens are drawn from the same logits


class OwnMask(torch.nn.Module):
    """A model that keeps to its own causal mask, whatever it is given."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=False):
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def test_prompts_are_shared_only_where_the_model_can(model_dir):
    model, device = make_trainer(model_dir).policy.model, torch.device("cpu")
    assert can_share_prompts(model, device, 1024)
    assert not can_share_prompts(OwnMask(model), device, 1024)
    model.config.sliding_window = 512
    assert not can_share_prompts(model, device, 1024)
    assert can_share_prompts(model, device, 512)


def test_what_the_policy_is_rewarded_for_it_learns(model_dir):
    wanted = 7
    trainer = make_trainer(model_dir, learning_rate=5e-3, algorithm={"correction": {"sequence_band": None}})
    generator = torch.Generator().manual_seed(0)

    def reward(tokens):
        return sum(token == wanted for token in tokens) / len(tokens)

    means = []
    for step in range(40):
        groups = [draw_group(trainer, 10 * step + k, [1, 2 + k], [4] * 8, reward, generator) for k in range(2)]
        means.append(sum(trajectory.reward for group in groups for trajectory in group.trajectories) / 16)
        trainer.step(groups)
        trainer.version += 1
    assert means[0] < 0.15
    assert min(means[-3:]) > 0.9


def test_without_a_rate_nothing_moves_and_training_agrees_with_what_drew_the_tokens(model_dir):
    trainer = make_trainer(model_dir, learning_rate=0.0)
    before = weights_of(trainer)
    for step in range(3):
        report = trainer.step(batch_of(trainer, step))
        assert report.floor is not None
        assert report.floor.abs_logprob.mean < 2e-6
        assert report.consistency is not None
        assert report.consistency.abs_logprob == report.floor.abs_logprob
        assert report.alarms == ()
        assert report.staleness is not None
        assert report.staleness.worst == 0
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())


def test_rollouts_of_other_weights_raise_an_alarm(model_dir):
    trainer = make_trainer(model_dir, learning_rate=0.0)
    groups = batch_of(trainer, 0)
    with torch.no_grad():
        trainer.policy.model.lm_head.weight.mul_(1.5)
    report = trainer.step(groups)
    assert any("mean |d log p|" in alarm for alarm in report.alarms)
    trainer.version = 3  # the same rollouts, now known as old ones
    later = trainer.step(groups)
    assert later.floor is None
    assert later.staleness is not None
    assert later.staleness.worst == 3


def test_entropy_is_of_the_distribution_at_its_temperature(model_dir):
    trainer = make_trainer(model_dir, learning_rate=0.0)
    generator = torch.Generator().manual_seed(2)
    group = draw_group(trainer, 0, [3, 4], [1, 1], alternating(), generator, temperature=0.5)
    with torch.no_grad():
        logits_V = trainer.policy.model(input_ids=torch.tensor([[3, 4]])).logits[0, -1] / 0.5
    wanted = float(torch.distributions.Categorical(logits=logits_V).entropy())
    assert trainer.step([group]).entropy == pytest.approx(wanted, rel=1e-5)


def test_groups_of_equal_rewards_are_dropped_and_named(model_dir):
    trainer = make_trainer(model_dir)
    generator = torch.Generator().manual_seed(1)
    useful = draw_group(trainer, 4, [1, 2], [3, 3], alternating(), generator)
    useless = draw_group(trainer, 5, [1, 2], [3, 3], lambda tokens: 1.0, generator)
    before = weights_of(trainer)
    empty = trainer.step([useless])
    assert (empty.dropped_group_ids, empty.num_rollouts, empty.updates, empty.entropy) == ((5,), 0, (), None)
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    report = trainer.step([useless, useful])
    assert (report.dropped_group_ids, report.num_rollouts, report.num_tokens) == ((5,), 2, 6)
    assert empty.rewards is not None
    assert report.rewards is not None
    assert report.shaped_rewards is not None
    assert (empty.rewards.mean, report.rewards.mean, report.shaped_rewards.mean) == (1.0, 0.75, 0.5)
    assert (empty.step, report.step) == (0, 1)


def test_a_failed_rollout_is_counted_and_not_learned_from(model_dir):
    trainer = make_trainer(model_dir)
    group = draw_group(trainer, 0, [1, 2], [3, 3, 3], alternating(), torch.Generator().manual_seed(1))
    failed = replace(group.trajectories[2], reward_parts=(), failure="the sandbox died")
    report = trainer.step([Group(trajectories=(*group.trajectories[:2], failed))])
    assert (report.num_failed, report.num_rollouts) == (1, 2)


def forked_group(trainer):
    """Three rollouts of 3, 4 + 7 and 5 tokens; the second is forked."""
    group = draw_group(trainer, 0, [1, 2], [3, 4, 5], alternating(), torch.Generator().manual_seed(1))
    turn = draw(trainer, [3, 4, 5], 7, 1.0, torch.Generator().manual_seed(2))
    fork = replace(group.trajectories[1], sample_index=3, turns=(turn,), forked_from=1)
    return Group(trajectories=(*group.trajectories, fork))


def grpo_gradient(model, samples, tokens_of_rollout):
    """-1/rollouts sum A grad log pi / the rollout's tokens, each token by a pass of its own over what came before it."""
    total = torch.zeros(())
    for sample, num_tokens in zip(samples, tokens_of_rollout, strict=True):
        for position in sample.output_positions:
            logits_V = model(input_ids=torch.tensor([sample.token_ids[:position]])).logits[0, -1]
            total = total - sample.advantage * logits_V.log_softmax(-1)[sample.token_ids[position]] / num_tokens / 3
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(total, list(names.values())), strict=True))


@pytest.mark.parametrize("pack_tokens", [1, 4096])
def test_the_trajectories_of_a_forked_rollout_weigh_together_as_one(model_dir, pack_tokens):
    trainer = make_trainer(model_dir, algorithm={"name": "grpo"}, pack_tokens=pack_tokens)
    forked = forked_group(trainer)
    batch = make_batch([forked], trainer.algorithm, max_output_tokens=16)
    assert [sample.trajectory.sample_index for sample in batch.samples] == [0, 1, 3, 2]
    assert batch.rollouts == [[0], [1, 2], [3]]
    wanted = grpo_gradient(trainer.policy.model, batch.samples, [3, 11, 11, 5])
    trainer.step([forked])
    found = gradients_of(trainer)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_a_forked_rollout_is_learned_from_in_one_minibatch(model_dir):
    trainer = make_trainer(model_dir, num_minibatches=4)
    report = trainer.step([forked_group(trainer)])
    assert sorted(update.num_tokens for update in report.updates) == [3, 5, 11]


def test_a_forked_rollout_is_compared_with_the_others_once(model_dir):
    trainer = make_trainer(model_dir, algorithm={"overlong_buffer_tokens": 8})
    forked = forked_group(trainer)
    # Rewards 0, 1 and 0, the second less 3/8 for its 4 + 7 tokens.
    samples = make_batch([forked], trainer.algorithm, max_output_tokens=16).samples
    worth = {sample.trajectory.sample_index: sample.advantage for sample in samples}
    mean = 0.625 / 3
    assert [worth[index] for index in range(4)] == pytest.approx([-mean, 0.625 - mean, -mean, 0.625 - mean])
    report = trainer.step([forked])
    assert (report.num_rollouts, report.num_tokens) == (3, 19)
    assert report.rewards is not None
    assert report.output_tokens is not None
    assert (report.rewards.mean, report.output_tokens.max) == (pytest.approx(1 / 3), 11)
    with pytest.raises(ConfigError, match="overlong_buffer_tokens 17 is more than max_output_tokens 16"):
        make_trainer(model_dir, algorithm={"overlong_buffer_tokens": 17})
    with pytest.raises(RolloutError, match="sample 1 of group 0 has 11 output tokens"):
        make_batch([forked], trainer.algorithm, max_output_tokens=10)


def test_long_answers_lose_reward_near_the_limit(model_dir):
    trainer = make_trainer(model_dir, algorithm={"overlong_buffer_tokens": 8})
    group = draw_group(trainer, 0, [1, 2], [8, 12, 16, 4], alternating(), torch.Generator().manual_seed(1))
    report = trainer.step([group])
    assert report.rewards is not None
    assert report.shaped_rewards is not None
    assert report.rewards.mean == 0.5
    assert report.shaped_rewards.mean == pytest.approx(0.5 - (0.5 + 1.0) / 4)
    assert report.output_tokens is not None
    assert (report.output_tokens.min, report.output_tokens.max) == (4, 16)


def test_the_kl_pulls_a_policy_back_to_where_it_began(model_dir):
    trainer = make_trainer(model_dir, algorithm={"kl_weight": 0.1, "drop_equal_rewards": False})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        trainer.policy.model.lm_head.weight.mul_(8.0)
    losses = []
    for step in range(8):
        groups = [draw_group(trainer, step, [1, 2], [8] * 8, lambda tokens: 1.0, generator)]
        update = trainer.step(groups).updates[0]
        assert update.loss == pytest.approx(update.kl_loss)  # equal rewards: there is nothing else
        losses.append(update.kl_loss)
    assert losses[0] > 0.01
    assert losses[-1] < 0.5 * losses[0]


def test_several_minibatches_are_weighed_by_the_policy_that_took_the_batch_up(model_dir):
    correction = {"correction": {"token_weight": "truncate", "sequence_band": None}}
    once = make_trainer(model_dir, algorithm=correction)
    often = make_trainer(model_dir, algorithm=correction, num_minibatches=4, learning_rate=0.05)
    groups = batch_of(once, 0)
    report = often.step(groups)
    assert len(report.updates) == often.num_updates == 4
    assert sum(update.num_tokens for update in report.updates) == report.num_tokens
    # pi_old / mu is 1 for every token, though the policy has moved far by the last update.
    assert all(update.truncated_fraction == 0.0 for update in report.updates)
    assert report.updates[0].clipped_high_fraction == report.updates[0].clipped_low_fraction == 0.0
    assert sum(update.clipped_high_fraction + update.clipped_low_fraction for update in report.updates) > 0.0
    alone = once.step(groups)
    assert report.consistency is not None
    assert alone.consistency is not None
    assert report.consistency.abs_logprob == alone.consistency.abs_logprob


def test_what_is_not_finite_moves_nothing_and_says_why(model_dir):
    trainer = make_trainer(model_dir)
    sound = draw_group(trainer, 0, [1, 2], [3, 3], alternating(), torch.Generator().manual_seed(1))
    used = {token for trajectory in sound.trajectories for turn in trajectory.turns for token in turn.output_token_ids} | {1, 2}
    spoilt = max(set(range(VOCAB)) - used)
    with torch.no_grad():
        trainer.policy.model.model.embed_tokens.weight[spoilt] = float("inf")
    turns = [replace(t.turns[0], prompt_token_ids=(1, spoilt)) for t in sound.trajectories]
    bad = Group(trajectories=tuple(replace(t, turns=(turn,)) for t, turn in zip(sound.trajectories, turns, strict=True)))
    before = weights_of(trainer)
    report = trainer.step([bad])
    assert report.skipped == ("the loss is nan",)
    assert report.consistency is None
    assert trainer.num_updates == 0
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    assert trainer.step([sound]).skipped == ()
    assert trainer.num_updates == 1


def test_a_gradient_that_overflows_moves_nothing_though_the_loss_is_finite(model_dir):
    trainer = make_trainer(model_dir)
    trainer.policy.model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weights_of(trainer)
    report = trainer.step(batch_of(trainer, 0))
    assert report.updates[0].loss is not None
    assert report.updates[0].grad_norm is None
    assert "gradient" in report.skipped[0]
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())


def test_the_rate_rises_and_the_gradient_is_held(model_dir):
    trainer = make_trainer(model_dir, warmup_steps=4, learning_rate=0.4, clip_norm=1e-3)
    reports = [trainer.step(batch_of(trainer, step)) for step in range(5)]
    assert [report.updates[0].learning_rate for report in reports] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    held = make_trainer(model_dir, clip_norm=1e-3)
    assert held.step(batch_of(held, 0)).updates[0].grad_norm > 1e-3
    norm = torch.cat([gradient.flatten() for gradient in gradients_of(held).values()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)


def test_rollouts_that_do_not_fit_are_refused_before_anything_moves(model_dir):
    trainer = make_trainer(model_dir)
    group = draw_group(trainer, 6, [1, 2], [3, 3], alternating(), torch.Generator().manual_seed(1))
    greedy = Group(trajectories=tuple(replace(t, temperature=0.0) for t in group.trajectories))
    foreign = [replace(t, turns=(replace(t.turns[0], prompt_token_ids=(1, 999)),)) for t in group.trajectories]
    trainer.version = 2
    future = batch_of(trainer, 0)
    trainer.version = 1
    before = weights_of(trainer)
    with pytest.raises(RolloutError, match="drawn by target 2, the policy is version 1"):
        trainer.step(future)
    with pytest.raises(RolloutError, match="temperature 0"):
        trainer.step([greedy])
    with pytest.raises(RolloutError, match="token 999"):
        trainer.step([Group(trajectories=tuple(foreign))])
    with pytest.raises(RolloutError, match="max_output_tokens is 2"):
        make_trainer(model_dir, max_output_tokens=2).step([group])
    assert trainer.num_steps == 0
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())


def test_recomputed_activations_give_the_same_gradient(model_dir):
    plain, saving = make_trainer(model_dir), make_trainer(model_dir, recompute_activations=True)
    groups = batch_of(plain, 0)
    plain.step(groups)
    saving.step(groups)
    for name, gradient in gradients_of(plain).items():
        torch.testing.assert_close(gradients_of(saving)[name], gradient)
