//! Two names that change places.

use offshoot_vfs::{Errno, Result};

use super::change::{NameTransaction, Touched};
use super::is_directory;
use super::rename::RenamePlan;
use crate::dir::change::{replace_name, set_parent};

impl NameTransaction<'_> {
    /// Lets each of two names lead to the file of the other.
    pub(super) fn exchange(&mut self, plan: &RenamePlan<'_>) -> Result<()> {
        let RenamePlan { from, to, source, target, .. } = *plan;
        let target = target.ok_or_else(|| to.error(Errno::NOENT))?;
        for (place, file) in [(from, target), (to, source)] {
            let work = replace_name(&mut self.t, place.dir, place.name, file)?;
            self.work.extend(work);
            self.touch(place.dir, Touched::Contents);
        }
        if plan.is_between_directories() {
            // Of each pair, the file that comes into a directory, and the other one.
            for (file, other, into, out_of) in
                [(source, target, to.dir, from.dir), (target, source, from.dir, to.dir)]
            {
                if !is_directory(file) {
                    continue;
                }
                if !is_directory(other) {
                    self.require_link(into)?;
                    self.add_links(into, 1)?;
                    self.lose_directory(out_of)?;
                }
                let work = set_parent(&mut self.t, file.0, into)?;
                self.work.extend(work);
                self.touch(file.0, Touched::Contents);
                self.touch(other.0, Touched::Inode);
            }
        }
        self.change_parent(source.0, Some(from), Some(to))?;
        self.change_parent(target.0, Some(to), Some(from))
    }
}
