"""What Liger-Kernel 0.8.5 patches in the same models, measured on 2026-11-30 with transformers 5.17.0 and its own
interpreter runs in fp32: norms and MLPs (experts among them) of the text path, rotation, loss, and what goes wrong.
It claims the classes listed and leaves all others alone. Its fused experts need a GPU and were not run."""

from __future__ import annotations

from typing import NamedTuple


class Liger(NamedTuple):
    norms: str
    mlps: str
    rope: str
    loss: str
    fault: str = ""

    def __str__(self) -> str:
        parts = [f"norms {self.norms}", f"MLPs {self.mlps}"]
        parts += [word for word, has in (("rope", self.rope), ("loss", self.loss)) if has == "yes"]
        return ", ".join(parts) + (f" (**{self.fault}**)" if self.fault else "")


_ROWS = """
DeepseekV2ForCausalLM 9/9 4/4 no yes
DeepseekV3ForCausalLM 9/9 3/3 no yes
DeepseekV4ForCausalLM 5/19 0/4 no yes
Exaone4ForCausalLM 9/9 2/2 yes yes
FalconH1ForCausalLM 5/5 2/2 yes yes
GemmaForCausalLM 5/5 2/2 yes yes
Gemma2ForCausalLM 9/9 2/2 yes yes
Gemma3ForConditionalGeneration 13/13 2/2 yes yes adds a soft cap where the configuration has one
Gemma3ForCausalLM 13/13 2/2 yes yes
Gemma4ForConditionalGeneration 13/18 2/2 no yes
Gemma4ForCausalLM 13/18 2/2 no yes
Glm4ForCausalLM 9/9 2/2 no yes
GptOssForCausalLM 5/5 0/4 yes yes
GraniteForCausalLM 5/5 2/2 yes no
HunYuanDenseV1ForCausalLM 5/9 2/2 yes yes
HunYuanMoEV1ForCausalLM 5/9 2/4 yes yes
LlamaForCausalLM 5/5 2/2 yes yes
Llama4ForCausalLM 5/7 2/4 yes yes
MinistralForCausalLM 5/5 2/2 yes yes
MistralForCausalLM 5/5 2/2 yes yes
MixtralForCausalLM 5/5 2/2 yes yes
MllamaForCausalLM 5/5 2/2 yes yes
NemotronForCausalLM 0/0 0/2 no yes
Olmo2ForCausalLM 5/9 2/2 yes yes
Olmo3ForCausalLM 5/9 2/2 yes yes
Phi3ForCausalLM 5/5 2/2 yes yes
Qwen2ForCausalLM 5/5 2/2 yes yes
Qwen3ForCausalLM 9/9 2/2 yes yes
Qwen3_5ForCausalLM 7/8 2/2 no yes
Qwen3_5MoeForCausalLM 7/8 4/4 no yes
Qwen3MoeForCausalLM 9/9 2/2 yes yes
Qwen3NextForCausalLM 7/8 4/4 no yes
SmolLM3ForCausalLM 5/5 2/2 yes yes
Glm4vForConditionalGeneration 9/9 2/2 no yes wrong gradients
Glm4vMoeForConditionalGeneration 5/5 3/3 no yes
InternVLForConditionalGeneration 5/5 2/2 yes yes
Llama4ForConditionalGeneration 5/7 2/4 yes no
LlavaForConditionalGeneration 5/5 2/2 yes yes
MllamaForConditionalGeneration 5/5 2/2 yes yes crashes on text
MuseGlimmerForConditionalGeneration 13/13 2/2 yes yes
PaliGemmaForConditionalGeneration 5/5 2/2 yes yes crashes in training
Qwen2_5_VLForConditionalGeneration 5/5 2/2 no yes
Qwen2VLForConditionalGeneration 5/5 2/2 no yes
Qwen3_5ForConditionalGeneration 7/8 2/2 no yes
Qwen3_5MoeForConditionalGeneration 7/8 4/4 no yes
Qwen3VLForConditionalGeneration 9/9 0/2 yes yes
Qwen3VLMoeForConditionalGeneration 9/9 2/2 yes yes
SmolVLMForConditionalGeneration 5/5 2/3 yes yes
"""

LIGER = {
    name: Liger(*rest.split(maxsplit=4)) for name, _, rest in (row.partition(" ") for row in _ROWS.split("\n")) if name
}
