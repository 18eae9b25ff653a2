"""Trackers: TensorBoard, Weights & Biases, MLflow, SwanLab and trackio receive what a run writes. Each runs in a process of its own."""
