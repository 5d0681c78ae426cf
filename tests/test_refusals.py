"""An argument out of range is refused where it is given, by its key and value; those of maths/ in its contracts."""

import re

import pytest
from helpers.fitting import Exact

import grpo_lightning
from grpo_lightning import UsageError
from grpo_lightning.sandbox.pool import WorkerPool

# The message has the last argument as it stands here, or what stands behind the arrow.
REFUSED = """
Arithmetic(max_digits=0); Arithmetic(max_digits=10); Arithmetic(num_terms=1); Arithmetic(num_train=0)
Arithmetic(num_val=0); Arithmetic(operators=[]); Arithmetic(operators=['/'])
Arithmetic(operators=['+', '+']) => ['+', '+']: give one or more of +, -, *, each once
Arithmetic(max_digits=1) => num_train=8000 and data.task.num_val=500 need 9000
Sampling(max_new_tokens=0); Sampling(temperature=-0.5); Sampling(top_k=-1); Sampling(top_p=0.0); Sampling(top_p=1.5)
Sampling(min_p=-0.1); Sampling(min_p=2.0); Sampling(stop=['']) => not empty; Sampling(stop=['a\ufffd']) => U+FFFD
Sampling(stop='ab') => give a list of strings, ['ab']; ValidationSampling(min_p=2).over(Sampling()) => sampling.min_p=2:
PlainEngine(max_rows=0); NativeEngine(max_rows=0); NativeEngine(check_every=0); NativeEngine(max_cache_gib=0)
NativeEngine(threads=0); Fast(threads=0)
VLLMEngine(gpu_memory=0); VLLMEngine(gpu_memory=1.5); VLLMEngine(max_cache_gib=0); VLLMEngine(max_model_len=1)
VLLMServerEngine(urls=[]); VLLMServerEngine(['http://node1:8000'], timeout=0)
VLLMServerEngine(['http://node1:8000'], wait=-1); VLLMServerEngine('http://node1:8000') => give a list of addresses
VLLMServerEngine(['node1:8000']) => 'node1:8000' is no address
VLLMServerEngine(['http://node1:port']) => 'http://node1:port' is no address
VLLMServerEngine(['http://node1/#x']) => 'http://node1/' is no address
VLLMServerEngine(['http://node1/a b']) => 'http://node1/a b' is no address
VLLMServerEngine(['http://' + 70 * 'n']) => is no address; VLLMServerEngine(['http://node1/\xfc']) => is no address
VLLMServerEngine(['http://me:secret@node1']) => model.engine.urls: an address with an @ may hold a password
VLLMServerEngine(['me:secret@node1']) => model.engine.urls: an address with an @ may hold a password
Gated(FormatReward(), Exact(weight=0)) => gate.weight=0
Gated(FormatReward(weight=0.2), Exact()) => reward.weight=0.2
OverlongPenalty(max_length=20, cache=0); OverlongPenalty(max_length=20, cache=21); FormatReward(pattern='(')
FunctionReward('f.py:f', concurrency=0); FunctionReward('sees') => import path; FunctionReward('') => import path
FunctionReward('my_rewards.') => import path; FunctionReward('path/to/my_rewards.py') => import path
FunctionReward('my_rewards:') => import path; FunctionReward(len) => give its import path as text
FunctionReward(None) => give its import path as text; FunctionReward(lambda sample: 1.0) => such as 'my_rewards.shorter'
ByPattern(pattern='(')
ProcessReward(TokenModel('m'), max_segments=0); ProcessReward(TokenModel('m'), reduce='max')
Replay(fraction=1.0); Replay(held_out=0.0); Replay(buffer_size=0)
RewardUpdate(lr=0.0); RewardUpdate(num_passes=-1); RewardUpdate(max_forgetting=-0.1)
LoRA(rank=0); LoRA(alpha=0.0); WorkerPool(num_workers=0); WorkerPool(timeout=-1.0); WorkerPool(memory_limit_mb=0)
"""


@pytest.mark.parametrize("refused", re.split("; |\n", REFUSED.strip()))
def test_an_argument_out_of_range_is_refused(refused: str) -> None:
    call, _, said = refused.partition(" => ")
    names = {name: getattr(grpo_lightning, name) for name in grpo_lightning.__all__ if f"{name}(" in call}
    with pytest.raises(UsageError) as caught:
        eval(call, names | {"Exact": Exact, "WorkerPool": WorkerPool})
    assert (said or re.findall(r"\w+=[^,]+", call)[-1].removesuffix(")")) in str(caught.value)
