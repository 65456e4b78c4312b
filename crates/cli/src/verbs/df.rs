//! `offshoot df`: shows how much of the volumes of places is used and free.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use offshoot_vfs::StatFs;
use offshoot_vfs::path::LastLink;
use serde::Serialize;

use crate::args::DfArguments;
use crate::exit::Result;
use crate::output::{Console, json_name, short_size, write_line, write_name};
use crate::places::{Failures, VolumePaths};

/// A volume as JSON.
#[derive(Serialize)]
struct Sizes {
    volume: String,
    size: u64,
    used: u64,
    available: u64,
}

pub(super) fn run(arguments: &DfArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let mut failures = Failures::new(console);
    let mut places = VolumePaths::new(&arguments.places, console);
    let mut found: Vec<(PathBuf, StatFs)> = Vec::new();
    while let Some(place) = places.next() {
        let sizes = place.and_then(|session| {
            let _held = session.file(LastLink::Follow)?;
            Ok((session.volume.clone(), session.fs.statfs()?))
        });
        match sizes {
            Ok(sizes) => found.push(sizes),
            Err(failure) => failures.opening(&failure),
        }
    }
    if arguments.json {
        for (volume, sizes) in found {
            let volume = json_name(volume.as_os_str().as_bytes());
            let StatFs { total_bytes: size, used_bytes: used, available_bytes: available, .. } =
                sizes;
            write_line(out, &Sizes { volume, size, used, available })?;
        }
        return failures.result();
    }
    let size = |bytes: u64| {
        if arguments.human_readable { short_size(bytes) } else { bytes.div_ceil(1024).to_string() }
    };
    let unit = if arguments.human_readable { "Size" } else { "1K-blocks" };
    let rows: Vec<[String; 4]> = found
        .iter()
        .map(|(_, sizes)| {
            let (used, available) = (sizes.used_bytes, sizes.available_bytes);
            [size(sizes.total_bytes), size(used), size(available), percent(used, available)]
        })
        .collect();
    let heads =
        [unit, "Used", if arguments.human_readable { "Avail" } else { "Available" }, "Use%"];
    let width = |at: usize| {
        rows.iter().map(|row| row[at].len()).chain([heads[at].len()]).max().unwrap_or(0)
    };
    let widths = [0, 1, 2, 3].map(width);
    let name_width = found.iter().map(|(volume, _)| volume.as_os_str().len()).max().unwrap_or(0);
    let name_width = name_width.max("Filesystem".len());
    let mut line = |name: &[u8], row: [&str; 4]| -> Result {
        write_name(out, name)?;
        write!(out, "{}", " ".repeat(name_width.saturating_sub(name.len())))?;
        for (text, width) in row.iter().zip(widths) {
            write!(out, " {text:>width$}")?;
        }
        Ok(writeln!(out)?)
    };
    if !rows.is_empty() {
        line(b"Filesystem", heads)?;
    }
    for ((volume, _), row) in found.iter().zip(&rows) {
        line(volume.as_os_str().as_bytes(), [&row[0], &row[1], &row[2], &row[3]])?;
    }
    failures.result()
}

/// The used part of the usable bytes as a percentage, rounded up like df.
fn percent(used: u64, available: u64) -> String {
    let whole = u128::from(used) + u128::from(available);
    if whole == 0 {
        "-".to_owned()
    } else {
        format!("{}%", (u128::from(used) * 100).div_ceil(whole))
    }
}
