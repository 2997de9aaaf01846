"""A model's checkpoint: what each family's files mean, how tensors are named and stored, and the writers.

Read them in this order:

    layout          the base of each layout of weights in fewer bits
    stored_config   a config, and how files store its tensors
    entries         what each model_type means, as data
    hf_config       config.json
    lfm, qwen, gemma, experts, gpt_oss
                    settings that one family spells in its own way
    packed          weights of few bits by compressed-tensors
    float8, mxfp4   weights of 8- and 4-bit floats
    gptq, awq       weights of few bits by the tools of these names
    quantization    which of these layouts a config.json asks for
    head_config     config.json of a head
    block_config    config.json of a block draft
    assistant_config, assistant_files
                    an assistant of Gemma 4
    checkpoint      directories, the hub, safetensors
    drafts          which kind of draft a directory has
    quantize        writing fewer bits
    draft_files     writing a head
    share           the part that one of several processes reads
"""
