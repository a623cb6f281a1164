"""Keys of a `config.json` that change nothing of the forward pass at inference."""

# What names a checkpoint, its makers and the programs that wrote it.
_ORIGIN = """_commit_hash _from_model_config _model_name_or_path _name_or_path architectures author
    auto_map base_model base_model_name_or_path custom_pipelines datasets description
    is_llama_config language library_name license model_name model_type model_version name
    name_or_path original_model pipeline_tag tags transformers.js_config transformers_version
    transformers_weights unsloth_fixed unsloth_optimized unsloth_version version"""
# Of training: dropout, first values, losses, memory.
_TRAINING = """attention_dropout attention_dropout_prob attention_probs_dropout_prob attn_dropout
    attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout ffn_dropout
    gradient_checkpointing hidden_dropout hidden_dropout_prob init_device init_method init_std
    initializer_cutoff_factor initializer_factor initializer_range loss_function loss_type
    mlp_dropout neftune_noise_alpha no_recompute_layers pp_recompute_interval
    recompute_granularity resid_dropout resid_pdrop residual_dropout scale_loss sequence_parallel
    tensor_parallel_output use_recompute use_reentrant virtual_pp_degree"""
# How a program computes or stores the same.
_RUNNING = """_attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _experts_implementation _flash_attn_2_enabled _pre_quantization_dtype attn_impl
    attn_implementation base_model_ep_plan base_model_pp_plan base_model_tp_plan bf16
    cache_implementation chunk_size_feed_forward dtype fp16 fp32 keys_to_ignore_at_inference
    logits_to_keep max_cache_len num_logits_to_keep onnx_export output_attentions
    output_hidden_states output_scores return_dict return_dict_in_generate tf_legacy_loss
    torch_dtype torchscript use_bfloat16 use_cache use_flash_attention use_flash_attention_2
    use_flash_attn use_fused_rms_norm use_fused_rope use_kernels use_liger_kernel
    use_memory_efficient_attention use_sdpa"""
# Of tokenizers and chats, which have files of their own.
_TEXT = """add_bos_token add_eos_token assistant_token_id bos_token bos_token_id chat_template
    clean_up_tokenization_spaces decoder_start_token_id eos_token eos_token_id
    max_sequence_length max_seq_len max_seq_length model_max_length pad_token pad_token_id
    padding_side prefix sep_token_id seq_length system_token_id tokenizer_class truncation_side
    unk_token unk_token_id user_token_id"""
# Of sampling, which generation_config.json speaks for.
_SAMPLING = """diversity_penalty do_sample early_stopping length_penalty max_length max_new_tokens
    min_length num_beam_groups num_beams num_return_sequences temperature top_k top_p typical_p"""
# Of other heads and other kinds of models.
_OTHERS = """finetuning_task id2label is_decoder is_encoder_decoder label2id layer_norm_eps
    num_labels problem_type task_specific_params tie_encoder_decoder"""
HARMLESS = frozenset(" ".join((_ORIGIN, _TRAINING, _RUNNING, _TEXT, _SAMPLING, _OTHERS)).split())
