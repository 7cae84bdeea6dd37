"""The table: the ten stories, their criteria, and the proofs of each."""

from __future__ import annotations

from stories.proofs import Missing, integration, nox, package, python, story

STORIES = (
    story(
        1,
        "Launch",
        {
            "the config is composed once; all ranks have the same": (
                integration(
                    "test_stories_launch",
                    "test_ranks_that_start_apart_have_one_folder_and_one_config",
                ),
            ),
            "exactly one run folder though ranks start 5 s apart": (
                integration(
                    "test_stories_launch",
                    "test_ranks_that_start_apart_have_one_folder_and_one_config",
                ),
                package("launch", "test_rendezvous"),
            ),
            "-m with 2 values gives 2 folders, each with its ranks": (
                integration(
                    "test_stories_launch", "test_a_sweep_of_two_has_two_folders_with_all_ranks"
                ),
                integration(
                    "test_launchers",
                    "test_a_sweep_has_a_run_on_processes_after_the_other_also_behind_one_that_fails",
                ),
            ),
            "in-process and spawn: the same losses, bit for bit": (
                integration("test_launchers", "test_processes_compute_what_threads_do_bit_for_bit"),
            ),
            "torchrun and mpiexec": (
                integration("test_launchers", "test_the_command_runs_under_other_launchers"),
                integration("test_two_hosts"),
            ),
            "submitit, on its local executor": (
                integration("test_launchers", "test_slurm_jobs_are_submitted_here_to_this_machine"),
                package("launch", "test_slurm_job"),
            ),
            "submitit, on Slurm": (Missing("never run on Slurm itself"),),
        },
    ),
    story(
        2,
        "Bad config",
        {
            "exit 2; key, file and nearest valid name; no trace; no torch import if it can be": (
                integration("test_mistakes"),
            ),
            "in less than 3 s, where no torch is imported": (
                python("mistakes", "--within", "3", counted=r"(\d+) mistakes, 0 badly"),
            ),
            "seen before PyTorch is imported": (
                package(
                    "launch",
                    "test_app",
                    "test_a_wrong_setting_is_answered_before_torch_is_loaded_with_exit_code_2",
                    "test_the_commands_check_their_settings_before_they_import_torch",
                ),
            ),
        },
    ),
    story(
        3,
        "Rank death",
        {
            "a rank of each backend: SIGKILL, exception, exit, SIGSTOP; others down, it is named": (
                integration("test_kills"),
                python("kills", "--count", "50", "--json", "JSON"),
            ),
            "a rank of a training run, at each moment": (
                python("kills", "--training", "--count", "50", "--json", "JSON"),
            ),
            "the last message names rank, host, operator and who never arrived": (
                integration("test_launchers", "test_a_rank_that_is_killed_is_named_with_its_log"),
                package("boxing-torch", "test_failures"),
                package("boxing-nccl", "test_failures"),
            ),
            "ranks that are left save what is whole, or say what is lost": (
                package("launch", "test_survivors"),
            ),
            "nothing leaks": (python("soak", counted=r"([\d,]+) steps"),),
        },
    ),
    story(
        4,
        "Crash-consistent save",
        {
            "200 SIGKILLs of saves, in both ways of saving: the newest committed one is loaded": (
                python("kills", "--saves", "--count", "100", "--json", "JSON"),
            ),
            "whatever fails, disk, folder or clock, the former one is still there": (
                package("launch", "test_checkpoint_failures"),
                package(
                    "launch",
                    "test_checkpoint_storages",
                    "test_a_kill_between_the_two_renames_leaves_the_earlier_folder",
                    "test_a_kill_before_the_manifest_leaves_the_former_objects",
                ),
            ),
            "a flipped byte in any file is refused by name": (
                package(
                    "launch",
                    "test_checkpoint",
                    "test_a_flipped_byte_anywhere_names_the_file_and_the_tensor",
                ),
                package(
                    "launch",
                    "test_resume",
                    "test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken",
                ),
            ),
            "a planted payload never runs": (
                package(
                    "launch",
                    "test_distributed_checkpoint",
                    "test_a_payload_in_the_metadata_is_named_and_does_not_run",
                    "test_a_payload_in_a_tensor_is_named_and_does_not_run",
                    "test_a_payload_in_a_value_is_named_and_tensors_are_read",
                ),
            ),
            "a run never starts at 0 without saying so": (
                package(
                    "launch",
                    "test_resume",
                    "test_auto_without_a_checkpoint_says_that_it_begins",
                    "test_a_manifest_that_is_cut_is_skipped_too_and_without_any_that_is_whole_"
                    "nothing_begins",
                ),
            ),
            "files from elsewhere are used or refused, whatever was edited": (
                python("fuzz", "--count", "20000", counted=r"(?m)^ *[a-z][a-z ]*?  +([\d,]+)"),
            ),
        },
    ),
    story(
        5,
        "Exact resume and reshard",
        {
            "100 steps are 50, a stop and 50, bit for bit": (
                integration("test_resume", "test_a_hundred_steps_are_fifty_a_stop_and_fifty"),
                integration("test_resume", "test_processes_go_on_where_they_stopped_bit_for_bit"),
                integration("test_resume_exactly"),
                package("launch", "test_resume", "test_stopped_and_resumed_is_the_unbroken_run"),
            ),
            "on another plan, the losses are those of the unbroken run": (
                integration("test_resume_elsewhere"),
                package(
                    "launch",
                    "test_data_run",
                    "test_a_run_on_other_ranks_has_the_losses_of_the_unbroken_one",
                ),
            ),
            "each sample exactly once": (
                integration("test_resume_elsewhere"),
                package(
                    "launch",
                    "test_data_order",
                    "test_whatever_the_sizes_of_batches_each_sample_is_taken_once_an_epoch",
                ),
                package(
                    "launch",
                    "test_data_run",
                    "test_a_run_goes_on_behind_a_broken_sample_on_other_ranks_with_each_sample_once",
                ),
            ),
            "torchrun starts a run again that has lost a rank, or a host": (
                integration(
                    "test_resume",
                    "test_torchrun_starts_a_run_again_that_has_lost_a_rank",
                    "test_a_host_less_is_planned_anew_and_goes_on_where_the_others_stopped",
                ),
            ),
        },
    ),
    story(
        6,
        "Right numbers",
        {
            "rules: random shapes, even, uneven, of size 0 and 1": (
                package("sbp-torch", "test_signatures_properties"),
            ),
            "rules of operators, on PyTorch's own samples, values and gradients": (
                python(
                    "signatures",
                    "--no-discover",
                    "--jobs",
                    "1",
                    counted=r"signatures claimed *│ *(\d+)",
                ),
            ),
            "whole steps: random strategies compute what one device does": (
                package("sbp-torch", "test_properties_compile"),
                package("sbp-torch", "test_properties_passes"),
            ),
            "boxing, any pair on any mesh, priced to the byte": (
                package("sbp-torch", "test_boxing_properties"),
            ),
            "every boxing pair in one process": (
                package("sbp-torch", "test_boxing_local", "TestLocalConformance"),
            ),
            "every boxing pair over gloo": (
                package("boxing-torch", "test_conformance", "TestTorchConformance"),
            ),
            "every boxing pair over MPI": (
                package("boxing-nccl", "test_conformance", "TestMpiConformance"),
            ),
            "every boxing pair over NCCL, on a GPU": (
                package("boxing-nccl", "test_nccl_gpu", "TestNcclOnGpus"),
            ),
        },
    ),
    story(
        7,
        "Plan explained",
        {
            "a table of operators, SBP, boxing, bytes and memory of a rank, without a GPU": (
                package("launch", "test_table"),
                package("launch", "test_report"),
                integration("test_train"),
            ),
            "what cannot be done says which constraint": (
                package("planner", "test_osdp"),
                integration("test_mistakes"),
            ),
            "milliseconds by operator": (
                Missing("steps, segments and boxing have predicted times, operators have not"),
            ),
            "32 layers for 64 devices, on a laptop": (integration("test_stories_plan"),),
            "why not this alternative": (
                package("launch", "test_alternatives"),
                package("launch", "test_explain_lines"),
            ),
            "the difference of two plans": (package("launch", "test_compare"),),
            "HTML, and Perfetto of the simulated schedule": (
                package("launch", "test_plan_page"),
                package(
                    "launch",
                    "test_figures_file",
                    "test_the_simulated_step_is_a_trace_of_all_ranks_that_ends_with_the_step",
                ),
            ),
            "a budget of search time, and the gap": (
                package("planner", "test_choice_solver", "test_the_time_limit_holds"),
                package(
                    "planner", "test_stages_lazy", "test_a_gap_ends_the_search_earlier_and_is_kept"
                ),
                package(
                    "launch",
                    "test_figures_file",
                    "test_bound_and_gap_are_the_planners_and_null_without",
                ),
            ),
        },
    ),
    story(
        8,
        "Third-party plugin",
        {
            "a planner in less than 100 lines, installed from its wheel and chosen": (
                nox("plugin"),
            ),
            "listed with name, distribution, version, API, kind and status": (
                package("sbp-core", "test_plugins_cli"),
                package(
                    "sbp-core",
                    "test_plugins_discovery",
                    "test_a_healthy_plugin_is_listed_with_all_that_is_known",
                ),
            ),
            "fails on import, another API, misspelt hook, repeated name: named, stops nobody": (
                package("sbp-core", "test_plugins_discovery"),
                package(
                    "launch",
                    "test_app",
                    "test_a_broken_plugin_is_named_first_and_stops_nobody_who_does_not_ask_for_it",
                    "test_two_distributions_that_bring_one_option_are_both_named",
                ),
            ),
            "strict refuses": (
                package(
                    "sbp-core", "test_plugins_discovery", "test_strict_raises_whatever_is_wrong"
                ),
                package(
                    "sbp-core",
                    "test_plugins_cli",
                    "test_problems_stand_below_and_count_only_with_strict",
                ),
            ),
            "a public kit tests each kind": (
                integration(
                    "test_api",
                    "test_the_page_says_what_a_plugin_author_writes_and_which_suite_tests_it",
                ),
                package("planner", "test_conformance"),
                package("actor-runtime", "test_conformance"),
                package("launch", "test_conformance"),
                package("launch", "test_checkpoint_storages"),
            ),
        },
    ),
    story(
        9,
        "Packages alone",
        {
            "each wheel in a fresh environment: every module imported, then its tests": (
                nox("alone"),
            ),
            "the lowest versions that are declared": (nox("lowest"),),
            "the oldest and the newest Python": (
                nox("alone(sbp-core)", "-P", "3.11"),
                nox("alone(sbp-core)", "-P", "3.13"),
                Missing("packages with PyTorch on another Python than that of nox"),
            ),
            "the core needs no MPI, CUDA or CuPy": (nox("lint"),),
            "nox finds the packages by itself": (nox("lint"),),
            "only packages that a change touches, then all together": (
                integration("test_repository"),
            ),
        },
    ),
    story(
        10,
        "See the run",
        {
            "a bar on a terminal, plain lines where output is piped": (
                package("launch", "test_progress"),
            ),
            "JSONL and TensorBoard": (
                package("launch", "test_metrics"),
                package("launch", "test_conformance", "TestJsonl", "TestTensorboard"),
            ),
            "one Perfetto file, a lane for each rank and actor thread, boxing with bytes": (
                integration("test_train"),
                package("launch", "test_trace_events"),
                package("launch", "test_trace_gather"),
            ),
            "a signal has every rank dump actors, credits and the last collectives": (
                integration("test_stories_status"),
                package("actor-runtime", "test_status"),
                package("launch", "test_status"),
            ),
            "tracing that is off costs nothing": (
                package("launch", "test_tracing", "test_no_step_is_traced_unless_asked_for"),
            ),
        },
    ),
)
