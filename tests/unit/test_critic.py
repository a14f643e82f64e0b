"""The critic: values at the last prompt token, a loss that is where it belongs, two bodies, kept state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_models

from lightning_rl.errors import UserError
from lightning_rl.records import token_ids
from lightning_rl.trainer.batches.packing import ModelShape
from lightning_rl.trainer.steps.critic import (
    AdapterBody,
    Critic,
    CriticSettings,
    OwnBody,
    explained_variance,
)

SHAPE = ModelShape(per_token=1e4, per_pair=1.0, shares_prefixes=True)
ROWS = ModelShape(per_token=1e4, per_pair=1.0, shares_prefixes=False)
PROMPTS = [token_ids(ids) for ids in ([5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 10], [11], [5, 6, 7])]


def own(settings: CriticSettings | None = None, *, shares: bool = True, model: Any = None) -> Critic:
    backbone = (model or tiny_models.llama()).base_model
    settings = settings or CriticSettings(learning_rate=1e-3)
    return Critic(OwnBody(backbone), settings, SHAPE if shares else ROWS, torch.device("cpu"))


def with_head(critic: Critic) -> Critic:
    torch.manual_seed(1)
    torch.nn.init.normal_(critic._head.weight)
    return critic


def test_values_are_read_at_the_last_prompt_token() -> None:
    model = tiny_models.llama()
    critic = with_head(own(model=model))
    wanted = []
    for prompt in PROMPTS:
        hidden = model.base_model(input_ids=torch.tensor([list(prompt)])).last_hidden_state
        wanted.append(critic._head(hidden[0, -1]).item())
    assert critic.values(PROMPTS) == pytest.approx(wanted, abs=1e-5)
    assert len(set(critic.values(PROMPTS))) == 4  # and equal prompts are worth the same


def test_shared_prefixes_and_padded_rows_agree() -> None:
    model = tiny_models.llama()
    shared, padded = with_head(own(model=model)), with_head(own(model=model, shares=False))
    assert shared.values(PROMPTS) == pytest.approx(padded.values(PROMPTS), abs=1e-5)


def test_micro_batches_change_nothing() -> None:
    returns = [1.0, 0.0, 0.5, -1.0, 1.0]
    values = []
    for tokens in (4, 1000):
        settings = CriticSettings(learning_rate=1e-2, micro_batch_tokens=tokens)
        critic = with_head(own(settings))
        critic.fit(PROMPTS, returns, critic.values(PROMPTS))
        values.append(critic.values(PROMPTS))
    assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_a_new_critic_thinks_nothing_of_anything() -> None:
    assert own().values(PROMPTS) == [0.0] * len(PROMPTS)
    bce = own(CriticSettings(learning_rate=1e-3, loss="bce"))
    assert bce.values(PROMPTS) == [0.5] * len(PROMPTS)


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_it_learns_what_calls_are_worth(loss: Any) -> None:
    critic = own(CriticSettings(learning_rate=3e-3, epochs=60, clip=10.0, loss=loss))
    returns = [1.0, 0.0, 0.0, 1.0, 1.0]
    first = critic.fit(PROMPTS, returns, critic.values(PROMPTS))
    assert first.explained_variance == pytest.approx(0.0)
    again = critic.fit(PROMPTS, returns, critic.values(PROMPTS))
    assert again.explained_variance is not None
    assert again.explained_variance > 0.9
    assert again.loss < first.loss
    assert critic.values(PROMPTS) == pytest.approx(returns, abs=0.3)


def test_the_first_loss_by_hand() -> None:
    # V = 0 everywhere: 1/2 mean(R^2) = 1/2 (1 + 4 + 0 + 0 + 1) / 5
    assert own().fit(PROMPTS, [1.0, -2.0, 0.0, 0.0, 1.0], [0.0] * 5).loss == pytest.approx(0.6)


def test_clipped_values_stop_pulling() -> None:
    """Beyond the clip the larger of both losses is the clipped one's, which has no gradient towards R."""
    critic = own(CriticSettings(learning_rate=1.0, clip=0.2))
    raw = torch.tensor([0.5, 0.1, -0.5], requires_grad=True)
    wanted, before = torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3)
    loss = critic._loss(raw, wanted, before)
    # clip(0.5) = 0.2: (0.2-1)^2 = 0.64 > 0.25; 0.1 is inside: 0.81; clip(-0.5) = -0.2: 1.44 < 2.25
    assert loss.tolist() == pytest.approx([0.32, 0.405, 1.125])
    loss.sum().backward()
    assert raw.grad is not None
    assert raw.grad.tolist() == pytest.approx([0.0, -0.9, -1.5])


def adapted() -> tuple[Any, Critic]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(tiny_models.llama(), config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    body = AdapterBody(model, config)
    return model, Critic(body, CriticSettings(learning_rate=1e-2), SHAPE, torch.device("cpu"))


def test_a_critic_on_an_adapter_leaves_the_policy_alone() -> None:
    model, critic = adapted()
    ids = torch.tensor([[5, 6, 7, 8]])
    policy = model(input_ids=ids).logits.detach().clone()
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    frozen = {n: v.detach().clone() for n, v in model.named_parameters() if ".critic." not in n}
    assert all(".default." in name for name in trained)
    for _ in range(3):
        critic.fit(PROMPTS, [1.0, 0.0, 0.5, -1.0, 1.0], [0.0] * 5)
    assert critic.values(PROMPTS) != [0.0] * len(PROMPTS)
    assert torch.equal(model(input_ids=ids).logits, policy)
    assert {name for name, value in model.named_parameters() if value.requires_grad} == trained
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    # nothing is left that the norm of the policy's next gradient would count
    assert all(value.grad is None for name, value in now.items() if ".critic." in name)


def test_state_comes_back(tmp_path: Path) -> None:
    for made in (own(), adapted()[1]):
        made.fit(PROMPTS, [1.0, 0.0, 0.5, -1.0, 1.0], [0.0] * 5)
        made.save(tmp_path)
        again = own() if isinstance(made._body, OwnBody) else adapted()[1]
        again.load(tmp_path)
        assert again.values(PROMPTS) == made.values(PROMPTS)
        made.fit(PROMPTS, [0.0] * 5, [0.0] * 5)
        again.fit(PROMPTS, [0.0] * 5, [0.0] * 5)
        assert again.values(PROMPTS) == pytest.approx(made.values(PROMPTS), abs=1e-6)


def test_a_state_of_another_shape_is_one_line(tmp_path: Path) -> None:
    own().save(tmp_path)
    with pytest.raises(UserError, match="can't be loaded as this run's critic"):
        adapted()[1].load(tmp_path)
    with pytest.raises(UserError, match="can't be loaded"):
        own().load(tmp_path / "nowhere")


def test_explained_variance_by_hand() -> None:
    assert explained_variance([0.0, 0.0], [1.0, -1.0]) == pytest.approx(0.0)
    assert explained_variance([0.5, -0.5], [1.0, -1.0]) == pytest.approx(0.75)
    assert explained_variance([1.0, 2.0], [3.0, 3.0]) is None
