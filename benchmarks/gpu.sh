#!/usr/bin/env bash
# Everything that needs a GPU, in the order of its worth. Each step takes less than nine minutes on one H100 or H200.
#
#     benchmarks/gpu.sh OUTPUT_DIR CIFAR10
#
# CIFAR10 is a folder of parquet files, or uoft-cs/cifar10. A finished step leaves OUTPUT_DIR/STEP.done and is not
# repeated, so the script can be stopped and started again. A step that fails or takes too long leaves its log, and
# the next one begins. DEVICE=cpu tries the script without a GPU, with STEPS=1 as fast as it goes.
set -u
out=$(realpath -m "$1") cifar10=$2 device=${DEVICE:-cuda} rounds=${STEPS:-7}
cd "$(dirname "$0")/.." && mkdir -p "$out"

step() { # NAME COMMAND...
    local name=$1; shift
    [ -e "$out/$name.done" ] && return
    echo "== $name: $*"
    if timeout 540 "$@" >"$out/$name.log" 2>&1; then touch "$out/$name.done"; else echo "$name: exit code $?"; fi
    tail -n 3 "$out/$name.log"
}

peers() { # NAME OPTIONS... : the model beside its peers
    step "$1" python benchmarks/peers.py --device "$device" --rounds "$rounds" --output "$out/$1.md" "${@:2}"
}

train() { # NAME RECIPE FLAGS...
    step "$1" python train.py "$2" --data "$cifar10" --output_dir "$out/$1" --disable_tqdm true "${@:3}"
}

# Aims in bf16 training on an H200: S/16 9,900 and B/16 3,500 images per second.
peers train_compiled --sizes S/16 B/16 --work training --precision bf16 --compiled --skip_memory --peers timm
peers infer_compiled --sizes S/16 --work inference --precision bf16 --compiled --skip_memory --peers timm

# Bits: two equal runs show whether the kernels repeat themselves, the third whether a resumed run repeats them.
bits=(--max_steps 16 --save_strategy steps --save_steps 0.5 --eval_strategy no --load_best_model_at_end false
    --logging_steps 1 --torch_compile false --full_determinism true)
train whole cifar10_gpu "${bits[@]}"
train again cifar10_gpu "${bits[@]}"
step same_bits_again cmp "$out/whole/model.safetensors" "$out/again/model.safetensors"
step prepare_resumed bash -c "mkdir -p '$out/resumed' && cp '$out/whole/_run.json' '$out/resumed' &&
    cp -r '$out/whole/checkpoint-8' '$out/resumed'"
train resumed cifar10_gpu "${bits[@]}" --resume_from_checkpoint true
step same_bits_resumed cmp "$out/whole/model.safetensors" "$out/resumed/model.safetensors"

train cifar10_gpu cifar10_gpu --max_train_minutes "${MINUTES:-8}"
peers train_eager_and_memory --sizes S/16 B/16 --work training --precision bf16
peers infer_eager --sizes S/16 B/16 --work inference --precision bf16 --skip_memory

# The attentions, 300 steps each: the last images_per_second of the log counts.
for attention in sdpa flex_attention flash_attention_2; do
    train "attention_$attention" cifar10_gpu --max_steps "${MAX_STEPS:-300}" --attn_implementation "$attention" \
        --save_strategy no --eval_strategy no --load_best_model_at_end false
done

step fsdp2 accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 1 train.py cifar10_gpu \
    --data "$cifar10" --output_dir "$out/fsdp2" --max_steps "${MAX_STEPS:-300}" --disable_tqdm true
