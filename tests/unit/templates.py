"""Chat templates of other models, in the parts that make multi-turn training go wrong."""

# Qwen2.5-VL: a default system prompt where the row has none; any role gets its own header.
DEFAULT_SYSTEM = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

# Qwen3: thoughts of earlier replies are removed when the conversation goes on.
STRIPS_THINKING = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last -%}
{{ message.content.split('</think>')[-1] }}
{%- else -%}{{ message.content }}{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

# One token each for header, picture and text: prompt "p p i i i p", observation "n o o o".
SHORT = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ message.content }}<|im_end|>
{% else -%}
<|im_start|>
{%- if message.content is string -%}{{ message.content }}
{%- else -%}<|vision_start|><|image_pad|>{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}
"""

# Qwen3, thinking: the last reply gets an empty thought, which goes when a user speaks again.
EMPTY_THOUGHT = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last -%}<think>

</think>

{% endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% endif -%}
"""

ONLY_LAST = """\
<|im_start|>{{ messages[-1].role }}
{{ messages[-1].content }}<|im_end|>
"""

NO_END = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
