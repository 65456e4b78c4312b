//! `offshoot rescue` for XFS: brings the log to disk, or throws it away.

use std::io::Write;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_xfs::{XfsOptions, XfsReport, XfsVolume, zero_xfs_log};
use serde_json::json;

use crate::edit::source_date;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, write_line};

/// What is said of an empty log.
const NOTHING: &str = "the log is empty: nothing was changed";

/// Opens volumes to change them as a whole; `console` shows what is found. What changes is
/// reproducible when the environment sets the time.
pub(super) fn options(console: &Arc<Console>) -> Result<XfsOptions> {
    let told = console.clone();
    Ok(XfsOptions {
        is_reproducible: source_date()?.is_some(),
        reporter: Some(Arc::new(move |report: &XfsReport| {
            // That the log is replayed is what the user asked for.
            if !matches!(report, XfsReport::LogReplayed { .. }) {
                told.warning(report);
            }
        })),
        ..XfsOptions::default()
    })
}

pub(in crate::verbs) fn replay_log(
    device: &Arc<dyn BlockDevice>,
    is_json: bool,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let recovery = XfsVolume::recover(device, &options(console)?)
        .map_err(|error| VerbFailure::Inside(device.name().into(), error))?;
    if is_json {
        let report = json!({
            "pending": recovery.is_some(),
            "from": recovery.as_ref().map(|done| &done.from),
            "to": recovery.as_ref().map(|done| &done.to),
            "torn": recovery.as_ref().map(|done| done.is_torn),
            "transactions": recovery.as_ref().map(|done| done.transactions),
            "items": recovery.as_ref().map(|done| done.replayed),
            "passed_over": recovery.as_ref().map(|done| done.passed_over),
            "finished_intents": recovery.as_ref().map(|done| done.finished_intents),
            "freed_inodes": recovery.as_ref().map(|done| done.freed_inodes),
            "freed_extents": recovery.as_ref().map(|done| done.freed_extents),
            "lost_lists": recovery.as_ref().map(|done| done.lost_lists),
        });
        return Ok(write_line(out, &report)?);
    }
    let Some(done) = recovery else { return Ok(writeln!(out, "{NOTHING}")?) };
    writeln!(
        out,
        "replayed: {} transactions, {} items, from {} to {}",
        done.transactions, done.replayed, done.from, done.to
    )?;
    if done.passed_over > 0 {
        writeln!(out, "passed over: {} items, whose blocks are newer or free", done.passed_over)?;
    }
    for (count, what) in [
        (done.finished_intents, "intents that the log had left"),
        (done.freed_inodes, "unlinked inodes, which are free now"),
        (done.freed_extents, "extents that were staged for copy on write, which are free now"),
    ] {
        if count > 0 {
            writeln!(out, "finished: {count} {what}")?;
        }
    }
    if done.lost_lists > 0 {
        let lists = done.lost_lists;
        let what = format!("{lists} damaged lists of unlinked inodes were emptied: run xfs_repair");
        console.warning(&what);
    }
    if done.is_torn {
        writeln!(out, "left out: records at the end, which a crash had torn")?;
    }
    Ok(())
}

pub(in crate::verbs) fn zero_log(
    device: &Arc<dyn BlockDevice>,
    is_json: bool,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let lost = zero_xfs_log(device, &options(console)?)
        .map_err(|error| VerbFailure::Inside(device.name().into(), error))?;
    if let Some(problem) = lost.as_ref().and_then(|lost| lost.counters_problem.as_ref()) {
        console.warning(&format_args!("the counters of the superblock are not summed: {problem}"));
    }
    if is_json {
        let problem = lost.as_ref().and_then(|lost| lost.problem.as_ref());
        let report = json!({
            "pending": lost.is_some(),
            "from": lost.as_ref().map(|lost| &lost.from),
            "transactions": lost.as_ref().map(|lost| lost.transactions),
            "items": lost.as_ref().map(|lost| lost.items),
            "problem": problem.map(ToString::to_string),
        });
        return Ok(write_line(out, &report)?);
    }
    let Some(lost) = lost else { return Ok(writeln!(out, "{NOTHING}")?) };
    let (transactions, items) = (lost.transactions, lost.items);
    writeln!(out, "thrown away: {transactions} transactions, with {items} items")?;
    if let Some(problem) = lost.problem {
        writeln!(out, "thrown away: what could not be read of the log ({problem})")?;
    }
    writeln!(out, "the new log begins at {}; have xfs_repair look at the volume", lost.from)?;
    Ok(())
}
