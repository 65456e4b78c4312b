//! `offshoot repair` for btrfs: says what is wrong, what is done about it, and what is left.

mod cut;
mod overlaps;

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_btrfs::{
    AcceptedData, AcceptedRange, BtrfsFinding, CheckEvent, DataUser, FileOfAcceptedData,
    RepairClass, RepairOptions, RepairOutcome, ScanOptions, confirm_repair, repair_btrfs,
    undo_repair,
};
use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_vfs::Errno;
use serde_json::json;

use super::check::{as_json, check_options, show_progress};
use super::scanned;
use crate::args::RepairArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::{self, is_interrupted};
use crate::output::{Console, Escaped, json_name, write_line};
use crate::session::{Access, Session};

pub(in crate::verbs) fn run(
    arguments: &RepairArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let check = check_options(&arguments.info.volume, &arguments.room)?;
    if arguments.classes.contains(&RepairClass::Chunks) && !arguments.search.scan {
        let what = "the class chunks is mended with --scan alone".to_owned();
        return Err(VerbFailure::Usage(what));
    }
    let is_safe_chosen = arguments.classes.iter().any(|class| class.is_safe());
    if is_safe_chosen && !arguments.cut_off.is_empty() {
        let what = "with --cut-off all that is safe is mended: of classes only overlaps can be \
                    given"
            .to_owned();
        return Err(VerbFailure::Usage(what));
    }
    let paths = arguments.accept_data.iter();
    let options = RepairOptions {
        check,
        classes: arguments.classes.clone(),
        accepted: paths.map(|path| path.as_bytes().to_vec()).collect(),
        scan: arguments.search.scan.then_some(ScanOptions { fsid: arguments.search.fsid }),
        cut_off: arguments.cut_off.iter().map(|name| cut::parse_name(name)).collect(),
        is_dry_run: arguments.dry_run,
    };
    interrupt::watch(console)?;
    let access = if arguments.dry_run { Access::Read } else { Access::Write };
    let devices = Session::devices_of(access, arguments.info.volume.parts(), console)?;
    let repaired = work(&devices, arguments, &options, console);
    match repaired {
        Err(error) if error.errno() == Errno::INTR && is_interrupted() => {
            console.error(&"interrupted: nothing was written");
            Err(VerbFailure::Reported(ExitStatus::Failed))
        }
        Err(error) if arguments.search.scan => {
            Err(scanned::failure(&arguments.info.volume.volume, error))
        }
        Err(error) => Err(VerbFailure::Inside(arguments.info.volume.volume.clone(), error)),
        Ok(RepairVerbResult::Repaired(outcome)) => tell(&outcome, arguments, out, console),
        Ok(RepairVerbResult::Undone(generation)) => {
            if arguments.info.json {
                let undone = json!({ "undone": true, "generation": generation });
                return Ok(write_line(out, &undone)?);
            }
            let would = if arguments.dry_run { "would be" } else { "is" };
            writeln!(out, "the volume {would} what it was after transaction {generation}")?;
            Ok(())
        }
        Ok(RepairVerbResult::Confirmed) => {
            if arguments.info.json {
                return Ok(write_line(out, &json!({ "confirmed": true }))?);
            }
            let would = if arguments.dry_run { "would stay" } else { "stays" };
            writeln!(out, "the repair {would}, and cannot be undone")?;
            Ok(())
        }
    }
}

/// What was done.
enum RepairVerbResult {
    Repaired(Box<RepairOutcome>),
    /// The newest transaction now.
    Undone(u64),
    Confirmed,
}

fn work(
    devices: &[Arc<dyn BlockDevice>],
    arguments: &RepairArguments,
    options: &RepairOptions,
    console: &Arc<Console>,
) -> offshoot_vfs::Result<RepairVerbResult> {
    let progress = console.start_progress("checked");
    let watch = |event: &CheckEvent| show_progress(event, &progress);
    let done = if arguments.undo {
        undo_repair(devices, options, &watch)
            .map(|generation| RepairVerbResult::Undone(generation.0))
    } else if arguments.confirm {
        confirm_repair(devices, options, &watch).map(|()| RepairVerbResult::Confirmed)
    } else {
        repair_btrfs(devices, options, &watch)
            .map(|outcome| RepairVerbResult::Repaired(Box::new(outcome)))
    };
    console.stop_progress();
    done
}

/// What is left when the repair is done.
fn rest(outcome: &RepairOutcome) -> &[BtrfsFinding] {
    &outcome.after.as_ref().unwrap_or(&outcome.before).findings
}

fn tell(
    outcome: &RepairOutcome,
    arguments: &RepairArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let rest = rest(outcome);
    for finding in rest {
        console.error(&Escaped(finding.to_string().as_bytes()));
    }
    if arguments.info.json {
        write_line(out, &as_one_object(outcome))?;
    } else {
        write_summary(outcome, rest, out)?;
    }
    if rest.is_empty() { Ok(()) } else { Err(VerbFailure::Reported(ExitStatus::Corrupt)) }
}

/// Says what is accepted, and of what other files.
fn write_accepted(accepted: &AcceptedData, is_written: bool, out: &mut dyn Write) -> Result {
    let is = if is_written { "accepted" } else { "would be accepted" };
    for file in &accepted.files {
        let path = Escaped(&file.path);
        for range in &file.ranges {
            let AcceptedRange { offset, len, logical } = range;
            writeln!(out, "{is}: {path}: {len} bytes at {offset}, address {logical}")?;
        }
        if file.ranges.is_empty() {
            writeln!(out, "{path}: all data fits its checksums")?;
        }
    }
    for user in &accepted.others {
        let DataUser { subvolume, ino, path } = user;
        let path = path.as_ref().map(|path| format!(" ({})", path.escape_ascii()));
        let path = path.unwrap_or_default();
        writeln!(
            out,
            "{is} as well, because it shares data: subvolume {subvolume}, inode {ino}{path}"
        )?;
    }
    if accepted.are_more_others {
        writeln!(out, "more files share data than are named here")?;
    }
    Ok(())
}

fn write_summary(outcome: &RepairOutcome, rest: &[BtrfsFinding], out: &mut dyn Write) -> Result {
    let is_rest = |finding: &&BtrfsFinding| {
        !rest.iter().any(|one| (one.code, one.place) == (finding.code, finding.place))
    };
    if let Some(found) = &outcome.scanned {
        for line in scanned::in_words(found) {
            writeln!(out, "found: {line}")?;
        }
    }
    let is_mended = |finding: &&BtrfsFinding| !cut::is_cut_off(finding, outcome);
    for finding in outcome.before.findings.iter().filter(is_rest).filter(is_mended) {
        writeln!(out, "mended: {}", Escaped(finding.to_string().as_bytes()))?;
    }
    write_accepted(&outcome.accepted, outcome.is_written, out)?;
    if outcome.after.is_none() {
        let what = if rest.is_empty() { "nothing is wrong" } else { "nothing of it can be mended" };
        writeln!(out, "{what}, and nothing was written")?;
        return write_choice(rest, out);
    }
    for cut in &outcome.cut_off {
        cut::write(cut, outcome.is_written, out)?;
    }
    overlaps::write(&outcome.overlaps, outcome.is_written, out)?;
    let trees: Vec<_> = outcome.trees.iter().map(ToString::to_string).collect();
    let (trees, blocks) = (trees.join(", "), outcome.blocks);
    if outcome.is_written {
        writeln!(out, "made anew: {trees}, with {blocks} blocks")?;
        writeln!(out, "until something else writes to the volume, repair --undo takes it back")?;
    } else {
        writeln!(out, "would be made anew: {trees}, with {blocks} blocks; nothing was written")?;
    }
    if !rest.is_empty() {
        writeln!(out, "{} findings are left: get out what is needed with extract", rest.len())?;
    }
    write_choice(rest, out)
}

/// Says with what options more could be mended.
fn write_choice(rest: &[BtrfsFinding], out: &mut dyn Write) -> Result {
    overlaps::write_choice(rest, out)?;
    cut::write_choice(rest, out)
}

fn as_one_object(outcome: &RepairOutcome) -> serde_json::Value {
    let all = |findings: &[BtrfsFinding]| findings.iter().map(as_json).collect::<Vec<_>>();
    json!({
        "scanned": outcome.scanned.as_ref().map(scanned::as_json),
        "before": all(&outcome.before.findings),
        "after": all(rest(outcome)),
        "accepted": outcome.accepted.files.iter().map(accepted_as_json).collect::<Vec<_>>(),
        "accepted_in": outcome.accepted.others.iter().map(user_as_json).collect::<Vec<_>>(),
        "accepted_in_more": outcome.accepted.are_more_others,
        "classes": outcome.classes.iter().copied().map(RepairClass::name).collect::<Vec<_>>(),
        "trees": outcome.trees.iter().map(|tree: &TreeId| tree.0).collect::<Vec<_>>(),
        "blocks": outcome.blocks,
        "cut_off": outcome.cut_off.iter().map(cut::as_json).collect::<Vec<_>>(),
        "overlaps": overlaps::as_json(&outcome.overlaps),
        "overlaps_more": outcome.overlaps.are_more,
        "written": outcome.is_written,
    })
}

fn accepted_as_json(file: &FileOfAcceptedData) -> serde_json::Value {
    let range = |range: &AcceptedRange| json!({ "offset": range.offset, "length": range.len, "logical": range.logical.0 });
    json!({
        "path": json_name(&file.path),
        "subvolume": file.subvolume.0,
        "inode": file.ino,
        "ranges": file.ranges.iter().map(range).collect::<Vec<_>>(),
    })
}

fn user_as_json(user: &DataUser) -> serde_json::Value {
    json!({
        "path": user.path.as_deref().map(json_name),
        "subvolume": user.subvolume.0,
        "inode": user.ino,
    })
}
