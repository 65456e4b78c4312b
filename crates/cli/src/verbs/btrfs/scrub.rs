//! `offshoot scrub`: reads and verifies every mirror of everything, and repairs bad ones.
//!
//! The engine scrubs with threads of its own, and this thread prints their findings. This thread
//! also checks whether the client still waits for the scrub: a client of a mount may have ended
//! long before.

use std::io::Write;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use offshoot_btrfs::{
    ScrubCounts, ScrubEvent, ScrubFinding, ScrubOptions, ScrubOutcome, ScrubOwner,
};
use offshoot_btrfs_format::TreeId;
use offshoot_transfer::TransferProgress as _;
use offshoot_vfs::Errno;
use serde::{Serialize, Serializer};
use serde_json::json;

use super::space::{Allocation, allocations};
use crate::args::ScrubArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::{self, is_interrupted};
use crate::output::{Console, Escaped, human_size, json_name, write_line};
use crate::session::{Access, Session};

/// How many findings may wait to be printed.
const MOST_TOLD: usize = 64;

/// How often this thread checks whether the client still waits.
const PATIENCE: Duration = Duration::from_millis(500);

/// A message that is printed during the scrub.
enum ScrubMessage {
    Found(Box<ScrubFinding>),
    /// A range that could not be scrubbed, and why.
    Skipped(String),
}

/// The counters, by their names.
struct NamedCounters<'c>(&'c ScrubCounts);

impl Serialize for NamedCounters<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.named())
    }
}

/// How many bytes will be read; `None` if that is not a multiple of the used bytes, or not known.
fn bytes_of_all_copies(allocations: &[Allocation]) -> Option<u64> {
    let bytes = |allocation: &Allocation| {
        let copies = match &*allocation.profile {
            "single" | "RAID0" => 1,
            "DUP" | "RAID1" | "RAID10" => 2,
            "RAID1C3" => 3,
            "RAID1C4" => 4,
            _ => return None,
        };
        allocation.used?.checked_mul(copies)
    };
    allocations.iter().try_fold(0, |sum: u64, one| sum.checked_add(bytes(one)?))
}

pub(in crate::verbs) fn run(
    arguments: &ScrubArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    // On a mount, the serving process handles signals.
    if arguments.volume.open.live.is_none() {
        interrupt::watch(console)?;
    }
    let access = if arguments.read_only { Access::Read } else { Access::Write };
    let session = Session::open_to_scrub(access, &arguments.volume, console)?;
    let options = ScrubOptions { is_read_only: arguments.read_only };
    let progress = console.start_progress("scrubbed");
    if !progress.is_hidden()
        && let Some(bytes) = bytes_of_all_copies(&allocations(&session.volume, console))
    {
        progress.expect(bytes);
    }
    let is_over = AtomicBool::new(false);
    let (sender, told) = sync_channel(MOST_TOLD);
    let (scrubbed, printed) = thread::scope(|scope| {
        let (session, progress, is_over) = (&session, &progress, &is_over);
        let scrub = move || {
            let watch = |event: &ScrubEvent<'_>| {
                // A send fails when the printing thread stopped receiving. The scrub then ends
                // soon.
                let _ = match event {
                    ScrubEvent::Progress(counts) => {
                        let bytes = counts.data_bytes_scrubbed + counts.tree_bytes_scrubbed;
                        progress.set_bytes(bytes);
                        Ok(())
                    }
                    ScrubEvent::Found(finding) => {
                        sender.send(ScrubMessage::Found(Box::new((*finding).clone())))
                    }
                    ScrubEvent::Skipped(chunk, error) => {
                        sender.send(ScrubMessage::Skipped(format!("the chunk at {chunk}: {error}")))
                    }
                };
                if is_over.load(Ordering::Relaxed) || is_interrupted() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            };
            session.volume.scrub(&options, &watch)
        };
        let scrub = scope.spawn(scrub);
        let printed = print_all(&told, arguments, is_over, out, console);
        (scrub.join().unwrap_or_else(|panic| resume_unwind(panic)), printed)
    });
    console.stop_progress();
    printed?;
    let counts = match scrubbed {
        Err(error) if error.errno() == Errno::INTR && is_interrupted() => {
            let what = "interrupted: not everything was looked at; what was corrected is stored";
            console.error(&what);
            return Err(VerbFailure::Reported(ExitStatus::Failed));
        }
        scrubbed => scrubbed?,
    };
    if arguments.json {
        write_line(out, &NamedCounters(&counts))?;
    } else {
        summary(&counts, out)?;
    }
    if counts.left_errors > 0 {
        return Err(VerbFailure::Reported(ExitStatus::Corrupt));
    }
    Ok(())
}

/// Prints the findings until the scrub is over.
fn print_all(
    told: &Receiver<ScrubMessage>,
    arguments: &ScrubArguments,
    is_over: &AtomicBool,
    out: &mut dyn Write,
    console: &Console,
) -> Result {
    let mut printed = Ok(());
    loop {
        let next = told.recv_timeout(PATIENCE);
        let live = arguments.volume.open.live.as_ref();
        if live.is_some_and(|live| !(live.is_wanted)()) {
            is_over.store(true, Ordering::Relaxed);
        }
        match next {
            Ok(one) if printed.is_ok() => {
                printed = print(&one, arguments.json, out, console);
                is_over.fetch_or(printed.is_err(), Ordering::Relaxed);
            }
            Err(RecvTimeoutError::Disconnected) => return printed,
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

fn print(told: &ScrubMessage, is_json: bool, out: &mut dyn Write, console: &Console) -> Result {
    match told {
        ScrubMessage::Skipped(problem) => {
            console.error(&format_args!("extents that were not looked at: {problem}"));
            if is_json {
                write_line(out, &json!({ "skipped": problem }))?;
            }
        }
        ScrubMessage::Found(finding) => {
            let text = in_words(finding);
            match finding.outcome {
                ScrubOutcome::Corrected => console.warning(&text),
                ScrubOutcome::NotWritten | ScrubOutcome::Uncorrectable => {
                    console.error(&text);
                    finding.owners.iter().for_each(|owner| console.detail(&of_owner(owner)));
                }
            }
            if is_json {
                write_line(out, &as_json(finding))?;
            }
        }
    }
    Ok(())
}

fn in_words(finding: &ScrubFinding) -> String {
    let ScrubFinding { structure, len_bytes, device, physical, problem, .. } = finding;
    let logical = finding.logical.map(|at| format!(" at logical address {at}"));
    let outcome = match finding.outcome {
        ScrubOutcome::Corrected => "corrected",
        ScrubOutcome::NotWritten => "not corrected",
        ScrubOutcome::Uncorrectable => "it cannot be corrected",
    };
    let logical = logical.unwrap_or_default();
    format!(
        "bad {structure}{logical}, {len_bytes} bytes ({device}, byte {physical}): {problem}: {outcome}"
    )
}

fn of_owner(owner: &ScrubOwner) -> String {
    match owner {
        ScrubOwner::File { path: Some(path), .. } => format!("file /{}", Escaped(path)),
        ScrubOwner::File { file, path: None } => {
            format!("inode {} of tree {}", file.ino, TreeId(file.dev))
        }
        ScrubOwner::Tree { tree: Some(tree), level } => format!("tree {tree}, level {level}"),
        ScrubOwner::Tree { tree: None, level } => format!("a tree, level {level}"),
        ScrubOwner::Others => "and others".to_owned(),
    }
}

fn as_json(finding: &ScrubFinding) -> serde_json::Value {
    let owners: Vec<_> = finding
        .owners
        .iter()
        .map(|owner| match owner {
            ScrubOwner::File { file, path } => json!({
                "subvolume": file.dev,
                "inode": file.ino,
                "path": path.as_ref().map(|path| format!("/{}", json_name(path))),
            }),
            ScrubOwner::Tree { tree, level } => {
                json!({ "tree": tree.map(|tree| tree.0), "level": level })
            }
            ScrubOwner::Others => json!({ "others": true }),
        })
        .collect();
    json!({
        "structure": finding.structure,
        "logical": finding.logical.map(|at| at.0),
        "bytes": finding.len_bytes,
        "device": json_name(finding.device.as_bytes()),
        "physical": finding.physical.0,
        "problem": finding.problem,
        "outcome": match finding.outcome {
            ScrubOutcome::Corrected => "corrected",
            ScrubOutcome::NotWritten => "not corrected",
            ScrubOutcome::Uncorrectable => "uncorrectable",
        },
        "owners": owners,
    })
}

fn summary(counts: &ScrubCounts, out: &mut dyn Write) -> Result {
    let bytes = counts.data_bytes_scrubbed + counts.tree_bytes_scrubbed;
    let (all, left) = (counts.found_errors(), counts.left_errors);
    let errors = match (all, left) {
        (0, _) => "no errors".to_owned(),
        (_, 0) => format!("all {all} errors corrected"),
        _ => format!("{left} of {all} errors left"),
    };
    writeln!(out, "{} scrubbed, {errors}", human_size(bytes))?;
    for (name, value) in counts.named() {
        writeln!(out, "  {name}: {value}")?;
    }
    Ok(())
}
