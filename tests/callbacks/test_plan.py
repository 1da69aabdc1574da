from types import SimpleNamespace

from lit_align.callbacks import Plan, StepProgressBar


def test_the_plan_says_what_is_trained_and_how_a_step_is_put_together(run, monkeypatch):
    said = []
    monkeypatch.setattr("lit_align.callbacks.plan.rank_zero_info", said.append)
    ran = run(callbacks=[Plan()], batch_size=2, accumulate_grad_batches=2, steps=3)
    parameters = f"{sum(p.numel() for p in ran.module.policy.parameters()):,}"
    policy, plan = said
    assert f"LlamaForCausalLM, {parameters} of {parameters} parameters trained" in policy
    assert "loss_type='dpo', beta=0.1" in policy
    # 7 pairs: 3 steps of 4 are 12 pairs.
    assert plan.startswith("plan: 3 steps over 7 pairs (1.7 epochs), each of 4: 2 per micro-batch")


def test_the_bar_names_no_last_epoch_where_there_is_none():
    bar = StepProgressBar()
    for last, expected in ((-1, "Epoch 3"), (5, "Epoch 3/4")):
        bar._trainer = SimpleNamespace(max_epochs=last)
        assert bar._get_train_description(3).strip() == expected
