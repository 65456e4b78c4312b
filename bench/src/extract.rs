//! Extracts a whole volume: into a directory, and as a tar stream.
//!
//! | side | what it does |
//! |---|---|
//! | ours | `offshoot extract` |
//! | restore | `btrfs restore` with metadata, symbolic links and attributes; not of XFS |
//! | kernel + cp | the kernel mounts the image, `cp -a` copies |
//! | kernel + tar | the kernel mounts the image, `tar` streams |
//!
//! A stream goes through a pipe to `cat`, because a `tar` that writes to `/dev/null` reads no data.

use std::path::Path;
use std::process::Command;

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::command;

use crate::measure::run;
use crate::table::{self, SideRuns};
use crate::volumes::{InputVolume, prepare};
use crate::{Result, SourceBenchOptions};

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    SourceBenchOptions::parse(args).map(|options| all(&options))
}

/// Mounts "$1", which has the format "$3", at "$2", and runs the rest there. Direct I/O avoids the
/// second cache of a buffered loop device. At the end, also after a failure, it unmounts and
/// detaches.
const WITH_MOUNT: &str = r#"
set -eu
image=$1 mnt=$2 format=$3; shift 3
loop=$(losetup --find --show --read-only --direct-io=on "$image")
trap 'umount "$mnt" || true; losetup --detach "$loop"' EXIT
mount -t "$format" -o ro,noatime "$loop" "$mnt"
(cd "$mnt" && eval "$1")
"#;

/// Runs every side of every job in turns, over one volume after the other.
fn run_sides(options: &SourceBenchOptions, inputs: &[InputVolume]) -> Result<Vec<SideRuns>> {
    let (outputs, mnt) = (options.dir.join("out"), options.dir.join("mnt"));
    clear(&outputs)?;
    for dir in [&outputs, &mnt] {
        std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    }
    let mut sides: Vec<SideRuns> = Vec::new();
    for input in inputs {
        let jobs = jobs(options, input, &mnt);
        let first = sides.len();
        sides.extend(jobs.iter().map(|(job, name, _)| SideRuns {
            job: format!("{} {job}", input.name),
            name: (*name).to_owned(),
            runs: Vec::new(),
        }));
        let mut counts = Vec::new();
        for round in 0..options.rounds {
            for (index, (job, name, make)) in jobs.iter().enumerate() {
                eprintln!(
                    "round {} of {}: {} {job}: {name}",
                    round + 1,
                    options.rounds,
                    input.name
                );
                let out = outputs.join(format!("{}-{round}-{index}", input.name));
                sides[first + index].runs.push(run(&mut make(&out))?);
                if out.exists() {
                    counts.push((*name, entries(&out)?));
                }
            }
        }
        // A side that leaves files out would win unfairly.
        if let Some(odd) = counts.iter().find(|one| one.1 != counts[0].1) {
            return Err(format!(
                "{} made {} entries, {} made {}",
                counts[0].0, counts[0].1, odd.0, odd.1
            ));
        }
    }
    clear(&outputs)?;
    Ok(sides)
}

/// The name of the side that reads btrfs alone.
const RESTORE: &str = "btrfs restore -m -S -x";

type ExtractCommand<'a> = (&'static str, &'static str, Box<dyn Fn(&Path) -> Command + 'a>);

fn jobs<'a>(
    options: &'a SourceBenchOptions,
    input: &'a InputVolume,
    mnt: &'a Path,
) -> Vec<ExtractCommand<'a>> {
    let image = &input.image;
    let kernel = move |script: String| {
        let mut sh = command("sh");
        sh.args(["-c", WITH_MOUNT, "sh"]).arg(image).arg(mnt).args([input.format, &script]);
        sh
    };
    let mut jobs: Vec<ExtractCommand<'_>> = vec![
        (
            "to directory",
            "ours",
            Box::new(move |out| {
                let mut ours = Command::new(&options.offshoot);
                ours.arg("extract").arg(image).arg(out);
                ours
            }),
        ),
        (
            "to directory",
            RESTORE,
            Box::new(move |out| {
                let mut sh = command("sh");
                sh.args(["-c", r#"mkdir "$2" && btrfs restore -m -S -x "$1" "$2""#, "sh"]);
                sh.arg(image).arg(out);
                sh
            }),
        ),
        (
            "to directory",
            "kernel + cp -a",
            Box::new(move |out| kernel(format!("cp -a . '{}'", out.display()))),
        ),
        (
            "to tar",
            "ours",
            Box::new(move |_| {
                let mut sh = command("sh");
                let script = r#""$1" extract "$2" --tar - | cat > /dev/null"#;
                sh.args(["-c", script, "sh"]).arg(&options.offshoot).arg(image);
                sh
            }),
        ),
        (
            "to tar",
            "kernel + tar",
            Box::new(move |_| {
                kernel("tar --xattrs --acls --sparse -cf - . | cat > /dev/null".to_owned())
            }),
        ),
    ];
    if input.format != "btrfs" {
        jobs.retain(|(_, name, _)| *name != RESTORE);
    }
    jobs
}

/// Removes the outputs of all runs. Never between two runs: ext4 avoids inodes that were freed just
/// now, so the run after a removal would pay for the search for others.
pub(crate) fn clear(out: &Path) -> Result {
    match std::fs::remove_dir_all(out) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", out.display()))
        }
        _ => Ok(()),
    }
}

/// The number of files, directories and links below `dir`.
pub(crate) fn entries(dir: &Path) -> Result<u64> {
    let mut count = 0;
    let mut stack = vec![dir.to_owned()];
    while let Some(dir) = stack.pop() {
        let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
        for entry in std::fs::read_dir(&dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            count += 1;
            if entry.file_type().map_err(failed)?.is_dir() {
                stack.push(entry.path());
            }
        }
    }
    Ok(count)
}

/// Prepares the input, runs all sides in turns, prints the table.
fn all(options: &SourceBenchOptions) -> Result {
    let _judges = judges::require().ok_or("the peers mount volumes, which takes root")?;
    std::fs::create_dir_all(&options.dir)
        .map_err(|error| format!("{}: {error}", options.dir.display()))?;
    let inputs = prepare(&options.dir, &options.source)?;
    let sides = run_sides(options, &inputs)?;
    table::print(&sides);
    let json = options.dir.join("extract.json");
    table::write_json(&json, &sides)?;
    println!("all runs: {}", json.display());
    Ok(())
}
