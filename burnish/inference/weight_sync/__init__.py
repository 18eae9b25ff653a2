"""New weights from the trainer to engines in other processes: in buckets, versioned, verified after every transfer."""
