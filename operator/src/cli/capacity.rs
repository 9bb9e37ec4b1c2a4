//! The capacity as people read it. What fits is decided in [`crate::capacity`].

use super::answer::Plain;
use super::table::{Cell, Style, Table, Tone, push};
use crate::capacity::Capacity;

impl Plain for Capacity {
    fn plain(&self, style: Style) -> String {
        let requests: Vec<String> = self
            .requests
            .iter()
            .map(|(name, amount)| format!("{name} {amount}"))
            .collect();
        let requests = if requests.is_empty() {
            "nothing set aside (spec.engine.resources.requests is empty)".into()
        } else {
            requests.join(", ")
        };
        let (tone, verdict) = if self.fits {
            (Tone::Good, "fits")
        } else {
            (Tone::Bad, "does not fit")
        };
        let mut text = format!(
            "capacity {}: {} more pods at the peak, room for {} ({requests} each)\n",
            style.paint(tone, verdict),
            self.needed,
            self.room
        );
        let mut table = Table::with_header(&["NODE", "ROOM", "LIMITED BY"]);
        for node in &self.nodes {
            table.row(vec![
                Cell::from(node.node.clone()),
                node.pods.to_string().into(),
                node.limit.clone().into(),
            ]);
        }
        text += &table.render(style, 2);
        for quota in &self.quotas {
            push(
                &mut text,
                format_args!("  {}\n", style.paint(Tone::Bad, quota)),
            );
        }
        text
    }
}
