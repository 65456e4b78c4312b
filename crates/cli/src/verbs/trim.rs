//! `offshoot trim`: tells the devices of a volume which of their ranges are unused.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

use offshoot_vfs::Trimmed;
use serde::Serialize;

use crate::args::InfoArguments;
use crate::exit::Result;
use crate::output::{Console, human_size, json_name, write_line};
use crate::session::{Access, AnySession};

#[derive(Serialize)]
struct TrimReport {
    /// The discarded bytes of all devices together.
    bytes: u64,
    /// The devices that cannot discard.
    unable: BTreeSet<String>,
}

pub(super) fn run(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let volume = AnySession::open_to(Access::Write, &arguments.volume, console)?.volume();
    let trimmed = volume.trim(0..u64::MAX);
    if arguments.volume.open.live.is_none() {
        volume.shut_down()?;
    }
    let Trimmed { bytes, unable } = trimmed?;
    for device in &unable {
        console.warning(&format_args!("{device}: its host cannot discard"));
    }
    if arguments.json {
        let unable = unable.iter().map(|device| json_name(device.as_bytes())).collect();
        return Ok(write_line(out, &TrimReport { bytes, unable })?);
    }
    writeln!(out, "{} trimmed", human_size(bytes))?;
    Ok(())
}
