//! `offshoot rescue`: repairs a volume that cannot be opened as it is.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{LostLog, SubvolumeId};
use offshoot_vfs::{Code, Error};
use serde::Serialize;

use crate::args::{InfoArguments, RescueVerb};
use crate::exit::Result;
use crate::output::{Console, write_line};
use crate::session::Session;

pub(in crate::verbs) fn run(
    verb: &RescueVerb,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    match verb {
        RescueVerb::ZeroLog(arguments) => zero_log(arguments, out, console),
        RescueVerb::ReplayLog(_) => {
            let what = "replaying the log of a btrfs volume by itself: that is for XFS, and every \
                        verb that writes a btrfs volume does it first";
            Err(Error::unsupported(Code::NotInFormat, what).into())
        }
    }
}

#[derive(Serialize)]
struct Lost {
    subvolume: u64,
    inodes: u64,
}

/// What was discarded with the log.
#[derive(Serialize)]
struct RescueReport {
    pending: bool,
    thrown_away: Vec<Lost>,
    /// Why the rest of the log could not be read.
    problem: Option<String>,
}

fn zero_log(arguments: &InfoArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let session = Session::open_to_rescue(&arguments.volume, console)?;
    let lost = session.volume.zero_log()?;
    if arguments.json {
        let mut report =
            RescueReport { pending: lost.is_some(), thrown_away: Vec::new(), problem: None };
        if let Some(LostLog { inodes, problem }) = lost {
            let lost =
                |(subvolume, inodes): (SubvolumeId, u64)| Lost { subvolume: subvolume.0, inodes };
            report.thrown_away = inodes.into_iter().map(lost).collect();
            report.problem = problem.map(|problem| problem.to_string());
        }
        return Ok(write_line(out, &report)?);
    }
    let Some(lost) = lost else {
        writeln!(out, "no log is pending: nothing was changed")?;
        return Ok(());
    };
    for (subvolume, inodes) in &lost.inodes {
        writeln!(out, "thrown away: the log of subvolume {subvolume}, with {inodes} inodes")?;
    }
    if let Some(problem) = lost.problem {
        writeln!(out, "thrown away: what could not be read of the log ({problem})")?;
    }
    Ok(())
}
