//! `offshoot recover --list-roots`.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{Rescue, RootChoice};
use serde_json::json;

use super::opened::RecoverSource;
use crate::args::RecoverArguments;
use crate::exit::Result;
use crate::output::{Console, write_line};
use crate::verbs::btrfs::losses::Losses;

/// Shows the roots of the volume that are still there, the newest first.
pub(super) fn list_roots(
    arguments: &RecoverArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let losses = Arc::new(Losses::default());
    let rescue = Rescue { root: RootChoice::Usable, ..Rescue::EVERYTHING };
    let source = RecoverSource::open(arguments, console)?;
    let volume = source.volume(rescue, losses.reporter(console), console)?;
    let used = volume.root_tree();
    for (found, is_readable) in volume.roots() {
        let root = found.root;
        let is_used = (root.logical, root.generation) == (used.logical, used.generation);
        if arguments.json {
            let line = json!({
                "generation": root.generation.0, "address": root.logical.0, "level": root.level,
                "source": found.source.to_string(), "readable": is_readable, "used": is_used,
            });
            write_line(out, &line)?;
            continue;
        }
        let state = match (is_readable, is_used) {
            (_, true) => ", used",
            (true, false) => "",
            (false, false) => ", cannot be read",
        };
        writeln!(
            out,
            "generation {}: block {}, level {}, found by {}{state}",
            root.generation, root.logical, root.level, found.source
        )?;
    }
    Ok(())
}
