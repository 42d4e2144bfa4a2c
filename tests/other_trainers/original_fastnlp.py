"""Scripts for fastNLP's Trainer and DistTrainer with everything on, which the recipes from_... are as loops.

recipes/FROM_FASTNLP.md shows them beside those. fastNLP is not installed here, so no test runs them; one
compares the names with those of the table.
"""


def trainer(model, train_dataloader, evaluate_dataloader):
    """fastNLP 1.0.1."""
    import torch
    from fastNLP import (
        Accuracy,
        CheckpointCallback,
        EarlyStopCallback,
        LoadBestModelCallback,
        TorchGradClipCallback,
        TorchWarmupCallback,
        Trainer,
    )

    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
        driver="torch",
        device=None,
        n_epochs=40,
        evaluate_dataloaders=evaluate_dataloader,
        metrics={"acc": Accuracy()},
        evaluate_every=40,
        accumulation_steps=2,
        fp16=True,
        monitor="acc#acc",
        larger_better=True,
        overfit_batches=0,
        progress_bar="rich",
        callbacks=[
            TorchWarmupCallback(0.1, "linear"),
            TorchGradClipCallback(clip_value=1.0, clip_type="norm"),
            CheckpointCallback(folder="runs/original", topk=2, last=True, monitor="acc#acc"),
            LoadBestModelCallback(),
            EarlyStopCallback(patience=15),
        ],
    )
    trainer.run(num_eval_sanity_batch=2)


def dist_trainer(model, train_data, dev_data):
    """fastNLP 0.5.5, started by `python -m torch.distributed.launch --nproc_per_node=2 script.py`."""
    import torch
    from fastNLP import (
        AccuracyMetric,
        CrossEntropyLoss,
        DistTrainer,
        EarlyStopCallback,
        GradientClipCallback,
        SaveModelCallback,
        WarmupCallback,
    )

    torch.distributed.init_process_group("nccl", init_method="env://")
    trainer = DistTrainer(
        train_data=train_data,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=4e-3),
        loss=CrossEntropyLoss(pred="pred", target="target"),
        callbacks_all=[WarmupCallback(0.1, "linear"), GradientClipCallback(clip_value=1.0), EarlyStopCallback(8)],
        callbacks_master=[SaveModelCallback("runs/original", top=1)],
        batch_size_per_gpu=32,
        n_epochs=30,
        num_workers=1,
        drop_last=False,
        dev_data=dev_data,
        metrics=AccuracyMetric(pred="pred", target="target"),
        metric_key="acc",
        update_every=2,
        print_every=20,
        validate_every=-1,
        save_path="runs/original",
        device="auto",
        fp16="O1",
        use_tqdm=True,
    )
    trainer.train(load_best_model=True)
    trainer.close()
