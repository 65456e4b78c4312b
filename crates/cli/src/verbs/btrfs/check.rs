//! `offshoot check` for btrfs: prints what the engine finds.

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CheckEvent, CheckOptions, CheckOutcome,
    FindingSeverity, check_btrfs,
};
use offshoot_transfer::TransferProgress as _;
use offshoot_vfs::Errno;
use serde_json::{Value, json};

use crate::args::{CheckArguments, CheckRoomArguments, VolumeArguments};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::{self, is_interrupted};
use crate::output::{Console, Escaped, ProgressLine, human_size, json_name, write_line};
use crate::session::{Access, Session, THIS_VERB};

/// The least memory of a check, in bytes.
const LEAST_MEMORY: u64 = 16 << 20;

/// The options of a check of metadata, for the verbs that check.
pub(super) fn check_options(
    volume: &VolumeArguments,
    room: &CheckRoomArguments,
) -> Result<CheckOptions> {
    let mut options = CheckOptions {
        is_degraded: volume.open.degraded,
        scratch: room.scratch.clone(),
        ..CheckOptions::default()
    };
    if let Some(bytes) = room.memory {
        if bytes < LEAST_MEMORY {
            return Err(VerbFailure::Usage("--memory must be at least 16M".to_owned()));
        }
        options.memory_bytes = bytes;
    }
    Ok(options)
}

/// Shows how far a check has come. Breaks when the user has interrupted the program.
pub(super) fn show_progress(event: &CheckEvent, progress: &ProgressLine) -> ControlFlow<()> {
    let CheckEvent::Progress { done, total } = event;
    if !progress.is_hidden() {
        progress.expect(*total);
        progress.set_bytes(*done);
    }
    if is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

pub(in crate::verbs) fn run(
    arguments: &CheckArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let options = CheckOptions {
        verifies_data: arguments.data,
        ..check_options(&arguments.info.volume, &arguments.room)?
    };
    // On a mount, the serving process handles signals.
    let live = arguments.info.volume.open.live.as_ref();
    if live.is_none() {
        interrupt::watch(console)?;
    }
    let progress = console.start_progress("checked");
    let watch = |event: &CheckEvent| {
        // A client of a mount may have ended long before.
        if live.is_some_and(|live| !(live.is_wanted)()) {
            return ControlFlow::Break(());
        }
        show_progress(event, &progress)
    };
    let checked = if let Some(live) = live {
        live.fs.btrfs(THIS_VERB)?.volume().check(&options, &watch)
    } else {
        let devices = Session::devices_of(Access::Read, arguments.info.volume.parts(), console)?;
        check_btrfs(devices, &options, &watch)
    };
    console.stop_progress();
    let outcome = match checked {
        Err(error) if error.errno() == Errno::INTR && is_interrupted() => {
            console.error(&"interrupted: not everything was looked at");
            return Err(VerbFailure::Reported(ExitStatus::Failed));
        }
        Err(error) => {
            return Err(VerbFailure::Inside(arguments.info.volume.volume.clone(), error));
        }
        Ok(outcome) => outcome,
    };
    for finding in &outcome.findings {
        console.error(&Escaped(finding.to_string().as_bytes()));
        if arguments.info.json {
            write_line(out, &as_json(finding))?;
        }
    }
    if arguments.info.json {
        write_line(out, &summary_as_json(&outcome))?;
    } else {
        write_summary(&outcome, out)?;
    }
    let is_read = |finding: &BtrfsFinding| finding.code != BtrfsFindingCode::NotRead;
    if outcome.findings.iter().any(is_read) {
        return Err(VerbFailure::Reported(ExitStatus::Corrupt));
    }
    if outcome.findings.is_empty() {
        return Ok(());
    }
    Err(VerbFailure::Reported(ExitStatus::Failed))
}

/// The worst severity of the findings.
fn worst(outcome: &CheckOutcome) -> Option<FindingSeverity> {
    outcome.findings.iter().map(|finding| finding.code.severity()).max()
}

/// Whether data is in danger, and the next step.
fn verdict(worst: Option<FindingSeverity>) -> &'static str {
    match worst {
        None => "nothing is wrong",
        Some(FindingSeverity::Minor) => {
            "no data is in danger: counts or spare copies are wrong, and what uses the volume can \
             go on"
        }
        Some(FindingSeverity::Unsafe) => {
            "all files can be read, but writing may destroy data: mount it read-only, and bring \
             out what is needed with extract"
        }
        Some(FindingSeverity::Lost) => {
            "some files cannot be read as they were written: do not write to the volume, and get \
             out the others with recover"
        }
    }
}

fn write_summary(outcome: &CheckOutcome, out: &mut dyn Write) -> Result {
    let counts = &outcome.counts;
    let data = match counts.data_bytes {
        0 => String::new(),
        bytes => format!(", {} of data compared", human_size(bytes)),
    };
    writeln!(
        out,
        "{} trees with {} blocks, {} inodes, {} extents of data checked{data}",
        counts.trees, counts.tree_blocks, counts.inodes, counts.data_extents
    )?;
    let count = outcome.findings.len();
    let verdict = verdict(worst(outcome));
    match (count, outcome.are_more) {
        (0, _) => writeln!(out, "{verdict}")?,
        (1, _) => writeln!(out, "1 finding; {verdict}")?,
        (_, false) => writeln!(out, "{count} findings; {verdict}")?,
        (_, true) => writeln!(out, "more than {count} findings; {verdict}")?,
    }
    Ok(())
}

fn summary_as_json(outcome: &CheckOutcome) -> Value {
    let counts = &outcome.counts;
    json!({
        "findings": outcome.findings.len(),
        "are_more": outcome.are_more,
        "severity": worst(outcome).map(FindingSeverity::name),
        "trees": counts.trees,
        "tree_blocks": counts.tree_blocks,
        "inodes": counts.inodes,
        "data_extents": counts.data_extents,
        "data_bytes": counts.data_bytes,
    })
}

/// A finding as an object of JSON.
pub(super) fn as_json(finding: &BtrfsFinding) -> Value {
    let (mut device, mut logical, mut tree, mut inode, mut key) = (None, None, None, None, None);
    match finding.place {
        BtrfsFindingPlace::Volume => {}
        BtrfsFindingPlace::Member(id) => device = Some(id),
        BtrfsFindingPlace::Logical(at) => logical = Some(at.0),
        BtrfsFindingPlace::Tree(id) => tree = Some(id.0),
        BtrfsFindingPlace::Block { tree: id, logical: at } => {
            (tree, logical) = (Some(id.0), Some(at.0));
        }
        BtrfsFindingPlace::Item { tree: id, key: at } => {
            (tree, key) = (Some(id.0), Some([at.objectid, u64::from(at.item_type.0), at.offset]));
        }
        BtrfsFindingPlace::Inode { subvolume, ino } => {
            (tree, inode) = (Some(subvolume.0), Some(ino));
        }
    }
    json!({
        "code": finding.code.name(),
        "number": finding.code.number(),
        "severity": finding.code.severity().name(),
        "device": device,
        "logical": logical,
        "tree": tree,
        "inode": inode,
        "key": key,
        "path": finding.path.as_ref().map(|path| json_name(path)),
        "problem": finding.problem,
        "expected": finding.expected,
        "found": finding.found,
    })
}
