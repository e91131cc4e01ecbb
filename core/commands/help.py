"""Help of the commands that have no module of their own; of the others it is their module's docstring."""

RUN_OPTIONS = """\
  -n 2                  number of processes (default 1); with --nodes, of each machine
  --nodes 2 --node-rank 0 --address HOST:29500    several machines: each runs this command with its own number (docs/scale.md)
  --restarts 3          if a process is lost, torchrun restarts all, from the newest complete checkpoint
  --accelerate-config FILE    processes and machines from accelerate's file instead
  --shard full          each process holds a part of the parameters, gradients and optimiser state (FSDP2); grad: all but the parameters
  --seeds 5             five seeds in parallel, or --seeds 0,1,2: their mean with its interval, and compare's input
  --init-from PATH      fine-tune: start from these weights (a file or a run folder), at a seventh of the learning rate
  --config FILE         settings from a file: an args.json, or one that `trainworthy config` wrote
  --preset full         another preset than tiny (some recipes have `small`, too)
  --max-steps 200       train at most this many steps in each stage (iterations, if the recipe makes its own samples)
  --board               show the run in TensorBoard; its address is printed once it answers
  --on-end CMD          a command that runs when the run ends, stops itself or fails a gate
  --json                result, verdicts and advice as JSON on stdout at the end; all other lines go to stderr
  --SETTING VALUE       any setting, such as --optim.lr 0.01; `trainworthy run RECIPE --help` lists those of a recipe"""

PAGES = {
    "list": """\
usage: trainworthy list [--json]
       trainworthy list --running [FOLDER] [--json]

Lists the recipes: what each one trains, its measured result and how long that took.

  trainworthy list                   every recipe
  trainworthy list --json            the same as JSON, with the recipes' paths
  trainworthy list --running         the runs in runs/ that are training now""",
    "run": f"""\
usage: trainworthy run RECIPE [-n N] [--seeds N] [--init-from PATH] [--config FILE] [--max-steps N] [settings]

Runs the gates, trains, exports, and writes the report. RECIPE is an id of `trainworthy list`, or the path of a fork.

  trainworthy run vision/classify                                 the preset tiny, in minutes
  trainworthy run ./mine.py --optim.lr 0.01 --train.epochs 5      a fork, with settings
  trainworthy run llm/sft -n 2 --init-from runs/llm-sft/20260101-120000-ab12    fine-tune on two processes

{RUN_OPTIONS}

Everything is in runs/<recipe>/<time>/. Ctrl-C saves and stops; `trainworthy resume RUN_FOLDER` continues.
Exit codes: 0 done, 2 bad usage, setting or data, 3 a gate failed, 4 the run stopped itself, 5 interrupted but saved.""",
    "lr": """\
usage: trainworthy lr RECIPE [--steps 200] [--json] [settings]

Learning-rate range test: the rate rises from batch to batch on the real data. Prints a suggestion, or why there is none.

  trainworthy lr vision/classify                         200 batches
  trainworthy lr ./mine.py --optim.name sgd --steps 100  another optimiser, fewer batches

Plot and numbers are in runs/<recipe>/checks/<time>/; `--json` prints the suggestion of each stage. Exit codes: 0, also without a
suggestion; 2 for bad usage or data.""",
    "fork": """\
usage: trainworthy fork RECIPE FILE.py

Copies a recipe to start your own, and lists the lines to edit first. A fork runs from any folder, behind the same gates.

  trainworthy fork vision/classify ./mine.py
  trainworthy run ./mine.py

It never overwrites a file. `trainworthy diff FILE.py` shows later what you changed.""",
    "resume": """\
usage: trainworthy resume RUN_FOLDER [--force] [-n N] [--json] [settings]
       trainworthy resume RUN_FOLDER --fallback NAME [--force] [settings]

Continues a stopped run from its newest complete checkpoint, with its own settings and number of processes. It refuses
(exit 2) if the sources, the data or the settings of the training are not those that the run was started with, or if the
run's record of them (environment.json, data.json) cannot be read. It reports packages of other versions. Settings of speed, memory
and files may change.

  trainworthy resume runs/vision-classify/20260101-120000-ab12
  trainworthy resume runs/llm-pretrain/20260101-120000-ab12 -n 2 --shard full --train.accumulate 2    on less memory
  trainworthy resume runs/distill-whisper/20260101-120000-ab12 --fallback head    a new run that starts from its weights

  --force        continue although sources, data or settings have changed
  --fallback NAME    train this fallback stage, which its recipe offers, in a folder of its own
  -n N           another number of processes: the same global batches, so the same losses up to rounding
  --SETTING      --train.accumulate, --train.eval-batch-size, --shard, --loader.*, --run.threads, --run.save-*, --run.keep-*,
                 --run.log-every, --run.tensorboard; all others are refused. They hold until the run stops again
  --nodes, --node-rank, --address, --restarts    as `trainworthy run`
  --json         result, verdicts and advice as JSON on stdout at the end

Exit codes: as `trainworthy run`.""",
    "report": """\
usage: trainworthy report RUN_FOLDER [--json]
       trainworthy report FOLDER [--metric NAME --higher-is-better|--lower-is-better] [--json]

Writes report.html of a run, or of a group of seeds, again. It trains nothing. It also reads runs of other tools: a TensorBoard
folder, or a trainer_state.json (transformers, TRL).

  trainworthy report runs/vision-classify/20260101-120000-ab12
  trainworthy report runs/vision-classify/20260101-120000-ab12 --json    verdicts, result and advice as JSON
  trainworthy report lightning_logs/version_3 --metric val_acc --higher-is-better    a run of another tool""",
    "reference": """\
usage: trainworthy reference RECIPE [--seeds 5] [--at-once N] [--to FILE] [settings]

Runs a recipe once per seed, with all gates, and writes the band of its curves. Reports of later runs draw their curves over it.

  trainworthy reference vision/classify                   five healthy runs
  trainworthy reference ./mine.py --seeds 3 --at-once 1   three, one after the other

  --seeds N      number of healthy runs (default 5, at least 3)
  --at-once N    runs in parallel (default: one per core)
  --to FILE      file to write (default: results/NAME.band.json next to the recipe)""",
}
