# SPDX-License-Identifier: Apache-2.0
"""A script for Horovod: the shape of its tensorflow2_synthetic_benchmark.py, one line changed.

The script builds a small model, so it does not need keras.applications.

fastps-run -np 2 python examples/tensorflow_synthetic_benchmark.py
"""

import argparse
import timeit

import numpy as np
import tensorflow as tf

import fastps.tensorflow as hvd  # was: import horovod.tensorflow as hvd

parser = argparse.ArgumentParser(description="Synthetic benchmark")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
layers = tf.keras.layers
model = tf.keras.Sequential(
    [
        tf.keras.Input((64, 64, 3)), layers.Conv2D(32, 3, 2), layers.BatchNormalization(),
        layers.ReLU(), layers.Conv2D(64, 3, 2), layers.GlobalAveragePooling2D(),
        layers.Dense(1000, activation="softmax"),
    ]
)  # fmt: skip
opt = tf.keras.optimizers.SGD(0.01)
data = tf.random.uniform([args.batch_size, 64, 64, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=999, dtype=tf.int64)


@tf.function
def benchmark_step(first_batch):
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(target, probs))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:  # as in Horovod's; opt.variables is a property in Keras 3
        return None
    return loss


def log(s):
    if hvd.rank() == 0:
        print(s)


log(f"Batch size: {args.batch_size}")
benchmark_step(first_batch=True)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(opt.variables, root_rank=0)
log("Running warmup...")
timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
log("Running benchmark...")
img_secs = []
for x in range(args.num_iters):
    time = timeit.timeit(
        lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter
    )
    img_secs.append(args.batch_size * args.num_batches_per_iter / time)
    log(f"Iter #{x}: {img_secs[-1]:.1f} img/sec per CPU")
mean, spread = np.mean(img_secs), 1.96 * np.std(img_secs)
log(f"Img/sec per CPU: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
hvd.shutdown()
