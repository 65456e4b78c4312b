//! What a search of all devices has found of a volume, for the verbs that search.

use std::path::Path;

use offshoot_btrfs::ScanOutcome;
use offshoot_vfs::{Code, Error};
use serde_json::{Value, json};

use crate::exit::{InVolume, VerbFailure};

/// The failure of a verb that has searched. If nothing was found, another search is no next step.
pub(super) fn failure(volume: &Path, error: Error) -> VerbFailure {
    if error.code() == Code::NoVolume {
        return VerbFailure::Refused(InVolume(volume, &error).to_string());
    }
    VerbFailure::Inside(volume.to_path_buf(), error)
}

/// What was found, a line for each part.
pub(super) fn in_words(found: &ScanOutcome) -> Vec<String> {
    let ScanOutcome { fsid, generation, newest, is_superblock_made, chunks, .. } = found;
    let mut lines = vec![format!("volume {fsid}, as of transaction {generation}")];
    if newest > generation {
        lines.push(format!("blocks of transaction {newest}, to which no whole root leads"));
    }
    if *is_superblock_made {
        lines.push(
            "no sound superblock; what only superblocks have is lost: the label, and what fsync \
             wrote since that transaction"
                .to_owned(),
        );
    }
    if let Some(chunks) = chunks {
        lines.push(format!("{chunks} chunks, for a new chunk tree"));
    }
    lines
}

/// The same as an object of JSON.
pub(super) fn as_json(found: &ScanOutcome) -> Value {
    json!({
        "fsid": found.fsid,
        "generation": found.generation.0,
        "newest": found.newest.0,
        "superblock_made": found.is_superblock_made,
        "chunks": found.chunks,
    })
}
